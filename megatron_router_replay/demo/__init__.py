"""The main job in one command: routes that a real vLLM returned, replayed in Megatron-Core, and the proof of it.

The model is a tiny Qwen3-MoE (random weights, 4 layers of which 3 are MoE), made of a seed. `data/` has its config, and the
response of vLLM 0.30.0 to 2 prompts with 4 answers each, over HTTP, in bf16 on a CPU, with routed experts and log-probs.
"""

from megatron_router_replay.demo.checkpoint import write_checkpoint
from megatron_router_replay.demo.run import DemoResult, load_response, run_demo

__all__ = ["DemoResult", "load_response", "run_demo", "write_checkpoint"]
