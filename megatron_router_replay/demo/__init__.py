"""The main job in one command: routes that a real vLLM returned, replayed in Megatron-Core, and the proof of it.

`data/` holds a tiny Qwen3-MoE checkpoint (random weights, 4 layers of which 3 are MoE) and the response of vLLM 0.30.0
to 8 prompts over HTTP, in bf16 on a CPU, with routed experts and log-probs; `examples/capture_vllm.py` made it.
"""

from megatron_router_replay.demo.run import DemoResult, run_demo

__all__ = ["DemoResult", "run_demo"]
