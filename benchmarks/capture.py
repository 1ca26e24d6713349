"""What capturing routes costs a generation: two of them in one process, one captured, one not, step by step in turns.

A transformers Qwen3-MoE of random weights on one thread; both generations use the same weights and make the same tokens. A
ratio is the median over pairs of a captured and a plain step that ran one right after the other, everything included:
announcing the requests, the forward with its hooks, choosing tokens, copying and sorting the routes. CPU time of the
thread is the figure to trust on a machine that others use too. "Own" is the CPU time of the capturer and its hooks by
themselves, with the routers' outputs at hand, as a share of the plain step.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.measure import Section, table
from megatron_router_replay.capture import RoutedExpertsCapturer, token_positions

TITLE = "Capture: generation with and without"

Seconds = tuple[float, float]
"""(wall, CPU time of this thread)."""


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


@contextmanager
def timed(seconds: list[Seconds]) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.thread_time()
    yield
    seconds.append((time.perf_counter() - wall, time.thread_time() - cpu))


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
def generate(model: Any, size: Size, capturer: RoutedExpertsCapturer) -> Iterator[Tensor]:
    """Prefill, then decode greedily; yields the tokens of each step [batch, 1] when it is done."""
    tokens = torch.randint(8192, (size.batch, size.prompt), generator=torch.Generator().manual_seed(1))
    names = list(range(size.batch))
    for name in names:
        capturer.add_request(name, num_prompt_tokens=size.prompt)
    with capturer.forward(names, token_positions(torch.ones_like(tokens))):
        output = model(tokens, use_cache=True, logits_to_keep=1)
    for position in range(size.prompt, size.prompt + size.new):
        tokens = output.logits[:, -1].argmax(dim=-1, keepdim=True)
        yield tokens
        with capturer.forward(names, [position] * size.batch):
            output = model(tokens, past_key_values=output.past_key_values, use_cache=True)
    for name in names:
        captured = capturer.finish(name, num_tokens=size.prompt + size.new)
        assert (captured is None) != capturer.enabled


def own_seconds(model: Any, size: Size, length: int) -> float:
    """Return the CPU seconds that the capturer and its hooks take of one forward of `length` tokens a request."""
    capturer = RoutedExpertsCapturer.create(model, max_num_tokens=size.batch * length)
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [next(iter(module._forward_hooks.values())) for module in routers]
    outputs = [(None, None, torch.randint(size.experts, (size.batch * length, size.topk))) for _ in routers]
    names = list(range(size.batch))
    for name in names:
        capturer.add_request(name, num_prompt_tokens=length)
    times: list[Seconds] = []
    for start in range(0, 100 * length, length):
        with timed(times), capturer.forward(names, [list(range(start, start + length))] * size.batch):
            for module, hook, output in zip(routers, hooks, outputs):
                hook(module, (), output)
    capturer.close()
    return statistics.median(cpu for _, cpu in times)


def measure_size(size: Size, repeats: int) -> list[dict[str, Any]]:
    """Return the samples of the prefill and of the decode step."""
    model = build(size)
    # Hooks are on one of two models that share every weight.
    plain = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    max_num_tokens = size.batch * size.prompt
    pairs: dict[str, dict[bool, list[Seconds]]] = defaultdict(lambda: {True: [], False: []})
    for repeat in range(repeats + 1):
        capturers = {
            True: RoutedExpertsCapturer.create(model, max_num_tokens=max_num_tokens),
            False: RoutedExpertsCapturer.create(plain, enable=False),
        }
        runs = {True: generate(model, size, capturers[True]), False: generate(plain, size, capturers[False])}
        for step in range(size.new):
            tokens = {}
            for enable in (True, False) if (repeat + step) % 2 else (False, True):
                # The first round warms up.
                seconds = pairs["decode step" if step else "prefill"][enable] if repeat else []
                with timed(seconds):
                    tokens[enable] = next(runs[enable])
            assert torch.equal(tokens[True], tokens[False])
        for enable in (True, False):
            assert next(runs[enable], None) is None
        capturers[True].close()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return [
        {
            "parameters": parameters,
            "layers": size.layers,
            "batch": size.batch,
            "part": name,
            "on": [[float(f"{value:.4g}") for value in pair] for pair in pairs[name][True]],
            "off": [[float(f"{value:.4g}") for value in pair] for pair in pairs[name][False]],
            "own": own_seconds(model, size, length),
        }
        for name, length in (("prefill", size.prompt), ("decode step", 1))
    ]


def measure(repeats: int = 10) -> list[dict[str, Any]]:
    """Measure every size on one thread."""
    torch.set_num_threads(1)
    return [part for size in SIZES for part in measure_size(size, repeats)]


def render(raw: list[dict[str, Any]]) -> str:
    """Return the table."""
    rows = []
    for part in raw:
        wall, cpu = (statistics.median(a[i] / b[i] for a, b in zip(part["on"], part["off"])) for i in (0, 1))
        plain_cpu = statistics.median(cpu for _, cpu in part["off"])
        model = f"{part['parameters'] / 1e6:.0f} M, {part['layers']}, {part['batch']}"
        ratios = [f"{cpu:.3f}", f"{wall:.3f}", f"{part['own'] / plain_cpu:.2%}", len(part["on"])]
        rows.append([model, part["part"], f"{plain_cpu * 1e3:.1f}", *ratios])
    head = ["parameters, layers, batch", "part", "off, ms", "on / off", "on / off, wall", "own", "pairs"]
    return table(head, rows)


def main() -> Section:
    raw = measure()
    return Section(title=TITLE, text=render(raw), raw=raw)
