"""Cost of capturing routes in a generation: the time spent in the capturer and its hooks, as a share of each step.

A transformers Qwen3-MoE of random weights on one thread. The seconds of two generations, one of them captured, differ by more
noise than capturing takes; so the calls of the capturer are timed inside captured generations. That leaves out only that
torch calls hooks.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers

from benchmarks.measure import rounded, table
from megatron_router_replay.capture import Capturer, token_positions

TITLE = "Capture: the capturer's share of a generation"


@dataclass(frozen=True, kw_only=True)
class Size:
    """Of the model and of the batch."""

    hidden: int = 512
    layers: int = 8
    experts: int = 32
    topk: int = 4
    batch: int = 16
    prompt: int = 32
    new: int = 17


SIZES = [Size(), Size(batch=64, hidden=256, prompt=16)]


def build(size: Size) -> Any:
    transformers.set_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=8192,
        hidden_size=size.hidden,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        moe_intermediate_size=size.hidden // 2,
        num_hidden_layers=size.layers,
        num_experts=size.experts,
        num_experts_per_tok=size.topk,
        mlp_only_layers=[],
        decoder_sparse_step=1,
    )
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


@torch.no_grad()
def generate(model: Any, size: Size, capturer: Capturer, timed: Callable[[Any], Any]) -> Iterator[None]:
    """Prefill, then decode greedily; yields after each step."""
    tokens = torch.randint(8192, (size.batch, size.prompt), generator=torch.Generator().manual_seed(1))
    names = list(range(size.batch))
    for name in names:
        capturer.add_request(name, num_prompt_tokens=size.prompt)
    sequences, positions, cache = tokens, token_positions(torch.ones_like(tokens)), None
    for position in range(size.prompt, size.prompt + size.new):
        forward = capturer.forward(names, positions)
        timed(forward.__enter__)()
        output = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        timed(forward.__exit__)(None, None, None)
        tokens = output.logits[:, -1].argmax(dim=-1, keepdim=True)
        sequences = torch.cat([sequences, tokens], dim=1)
        cache, positions = output.past_key_values, [position] * size.batch
        yield
    for name in names:
        assert capturer.finish(name, sequences[name]) is not None


def measure_size(size: Size, repeats: int) -> dict[str, Any]:
    """Return (seconds of the step, seconds of the capturer in it) of prefills and of decode steps."""
    model = build(size)
    spent = [0.0]

    def timed(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[0] += time.thread_time() - start

        return call

    samples: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for repeat in range(repeats + 1):
        capturer = Capturer(model, max_num_tokens=size.batch * size.prompt)
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in hooks:
                    hooks[key] = timed(hooks[key])
        run = generate(model, size, capturer, timed)
        for step in range(size.new):
            spent[0], start = 0.0, time.thread_time()
            next(run)
            if repeat:  # the first warms up
                seconds = time.thread_time() - start
                samples["decode step" if step else "prefill"].append((rounded(seconds), rounded(spent[0])))
        assert next(run, None) is None
        capturer.close()
    return {"size": asdict(size), "parameters": sum(map(torch.Tensor.numel, model.parameters())), "samples": samples}


def measure(repeats: int = 4) -> list[dict[str, Any]]:
    """Measure every size on one thread."""
    torch.set_num_threads(1)
    return [measure_size(size, repeats) for size in SIZES]


def render(raw: list[dict[str, Any]]) -> str:
    """Return the table."""
    rows = []
    for of_size in raw:
        size = of_size["size"]
        model = f"{of_size['parameters'] / 1e6:.0f} M, {size['layers']}, {size['batch']}"
        for part, samples in of_size["samples"].items():
            step = statistics.median(whole for whole, _ in samples)
            share = statistics.median(own / whole for whole, own in samples)
            rows.append([model, part, f"{step * 1e3:.1f}", f"{share:.2%}", len(samples)])
    return table(["parameters, layers, batch", "part", "ms", "capturer's share, median", "steps"], rows)
