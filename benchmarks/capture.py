"""What capturing routes costs a generation: three of them in one process, one captured, two not, step by step in turns.

A transformers Qwen3-MoE of random weights on one thread; all generations use the same weights and make the same tokens. A
ratio is the median over rounds, in which the same step ran once in each, in an order drawn anew, everything included:
announcing the requests, the forward with its hooks, choosing tokens, copying and sorting the routes. "off / off" is what the
two that are not captured differ by: noise. CPU time of the thread is the figure to trust on a machine that others use too.
"Own" is the time inside the capturer and its hooks during further captured generations, as a share of their steps: of what
capturing adds it leaves out only that torch calls hooks, and it has no noise of two generations. Between two matrix products
nothing of this code is in the processor's caches, so it takes several times what it takes by itself.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.measure import Section, ratio, table
from megatron_router_replay.capture import RoutedExpertsCapturer, create_capturer, token_positions

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


def own_shares(model: Any, size: Size, repeats: int = 4) -> dict[str, float]:
    """Return the median share of its steps that a generation spends in the capturer and its hooks."""
    spent = [0.0]

    def timed_call(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[0] += time.perf_counter() - start

        return call

    shares: dict[str, list[float]] = defaultdict(list)
    for repeat in range(repeats + 1):
        capturer = create_capturer(model, max_num_tokens=size.batch * size.prompt)
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in hooks:
                    hooks[key] = timed_call(hooks[key])
        for name in ("begin_forward", "end_forward"):
            setattr(capturer, name, timed_call(getattr(capturer, name)))
        run = generate(model, size, capturer)
        for step in range(size.new):
            spent[0], start = 0.0, time.perf_counter()
            next(run)
            if repeat:  # the first warms up
                shares["decode step" if step else "prefill"].append(spent[0] / (time.perf_counter() - start))
        assert next(run, None) is None
        capturer.close()
    return {part: statistics.median(of_part) for part, of_part in shares.items()}


ARMS = ("on", "off", "off again")
"""Captured; not; and not once more: how far "off again" is from "off" is the noise of this machine and of three models."""


def measure_size(size: Size, repeats: int) -> list[dict[str, Any]]:
    """Return the samples of the prefill and of the decode step."""
    model = build(size)
    # Hooks are on one of three models that share every weight.
    weights = {id(parameter): parameter for parameter in model.parameters()}
    models = {"on": model, **{arm: copy.deepcopy(model, dict(weights)) for arm in ARMS[1:]}}
    max_num_tokens = size.batch * size.prompt
    samples: dict[str, dict[str, list[Seconds]]] = defaultdict(lambda: {arm: [] for arm in ARMS})
    order = Random(0)
    for repeat in range(repeats + 1):
        capturers = {
            arm: create_capturer(models[arm], enable=arm == "on", max_num_tokens=max_num_tokens) for arm in ARMS
        }
        runs = {arm: generate(models[arm], size, capturers[arm]) for arm in ARMS}
        for step in range(size.new):
            tokens = {}
            for arm in order.sample(ARMS, len(ARMS)):
                # The first round warms up.
                seconds = samples["decode step" if step else "prefill"][arm] if repeat else []
                with timed(seconds):
                    tokens[arm] = next(runs[arm])
            assert all(torch.equal(tokens["on"], tokens[arm]) for arm in ARMS)
        for arm in ARMS:
            assert next(runs[arm], None) is None
            capturers[arm].close()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    own = own_shares(model, size)
    return [
        {
            "parameters": parameters,
            "layers": size.layers,
            "batch": size.batch,
            "part": name,
            **{arm: [[float(f"{value:.4g}") for value in pair] for pair in samples[name][arm]] for arm in ARMS},
            "own": own[name],
        }
        for name in ("prefill", "decode step")
    ]


def measure(repeats: int = 10) -> list[dict[str, Any]]:
    """Measure every size on one thread."""
    torch.set_num_threads(1)
    return [part for size in SIZES for part in measure_size(size, repeats)]


def render(raw: list[dict[str, Any]]) -> str:
    """Return the table."""
    rows = []
    for part in raw:
        # Samples taken before there was a second plain generation have no noise to show.
        cpu, wall = ({arm: [pair[i] for pair in part[arm]] for arm in ARMS if arm in part} for i in (1, 0))
        plain_cpu = statistics.median(cpu["off"])
        model = f"{part['parameters'] / 1e6:.0f} M, {part['layers']}, {part['batch']}"
        rows.append(
            [
                model,
                part["part"],
                f"{plain_cpu * 1e3:.1f}",
                ratio(cpu, "on", "off"),
                ratio(cpu, "off again", "off") if "off again" in cpu else "-",
                f"{ratio(wall, 'on', 'off').median:.3f}",
                f"{part['own']:.2%}",
                len(part["on"]),
            ]
        )
    head = ["parameters, layers, batch", "part", "off, ms", "on / off", "off / off", "on / off, wall", "own", "rounds"]
    return table(head, rows)


def main() -> Section:
    raw = measure()
    return Section(title=TITLE, text=render(raw), raw=raw)
