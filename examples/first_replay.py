"""The first replay: what a real vLLM returned for one prompt, its routes in Megatron-Core on this CPU, and the report.

python examples/first_replay.py
"""

import tempfile

import torch

import megatron_router_replay as mrr
from megatron_router_replay.demo import load_response, write_checkpoint
from megatron_router_replay.testing import ParallelSizes, load_qwen3_moe, megatron_on_cpu

folder = tempfile.TemporaryDirectory()
checkpoint = write_checkpoint(folder.name)  # a tiny Qwen3-MoE
response = load_response()  # what vLLM, which served it, answered to 8 prompts

trace = mrr.engines.vllm.decode(response, model=checkpoint, choice=0)  # decode_batch takes all 8
print(trace)

with megatron_on_cpu():  # on a GPU, and in a trainer, Megatron-Core is up already
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    layout = ParallelSizes()
    layout.initialize()
    model_chunks = load_qwen3_moe(checkpoint, layout)

    tokens = trace.token_ids.long().unsqueeze(0)  # [1, num_tokens]
    positions = torch.arange(len(trace)).unsqueeze(0)
    with mrr.replay(model_chunks, trace) as session:
        model_chunks[0](input_ids=tokens, position_ids=positions, attention_mask=None).sum().backward()
    print(session.report)
    torch.distributed.destroy_process_group()
