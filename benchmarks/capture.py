"""What capturing routes costs a generation: the same sampling loop with capture on and off, side by side in one process.

    python benchmarks/capture.py [--rounds 8] [--hidden 1024] [--layers 8] [--batch 16]

Each round generates the same tokens twice, on and off in alternating order; the medians over all decode steps, and over the
prefills, are compared. CPU time of the one thread that computes is what counts on a machine that others use too; wall
time stands beside it. "own" is the time inside the capturer and its hooks, timed by itself, as a share of a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from megatron_router_replay.capture import RoutedExpertsCapturer, token_positions

Clock = dict[str, list[tuple[float, float]]]


@contextmanager
def timed(clock: Clock, name: str) -> Iterator[None]:
    wall, cpu = time.perf_counter(), time.thread_time()
    yield
    clock.setdefault(name, []).append((time.perf_counter() - wall, time.thread_time() - cpu))


def build(args: argparse.Namespace) -> Any:
    transformers.set_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=32000,
        hidden_size=args.hidden,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        intermediate_size=2 * args.hidden,
        moe_intermediate_size=args.hidden // 4,
        num_hidden_layers=args.layers,
        num_experts=args.experts,
        num_experts_per_tok=args.topk,
        mlp_only_layers=[],
        decoder_sparse_step=1,
        max_position_embeddings=4096,
    )
    return transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, args.dtype)).eval()


@torch.no_grad()
def generate(model: Any, args: argparse.Namespace, capturer: RoutedExpertsCapturer) -> tuple[Clock, torch.Tensor]:
    """Sample greedily; the whole step is timed: announcing, forward, choosing tokens, and at the end the finish."""
    clock: Clock = {}
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(32000, (args.batch, args.prompt), generator=generator)
    sequences = [tokens]
    names: list[int | None] = list(range(args.batch))
    with timed(clock, "prefill"):
        for name in names:
            capturer.add_request(name, num_prompt_tokens=args.prompt)
        with capturer.forward(names, token_positions(torch.ones_like(tokens))):
            output = model(tokens, use_cache=True, logits_to_keep=1)
        tokens = output.logits[:, -1].argmax(dim=-1, keepdim=True)
    for position in range(args.prompt, args.prompt + args.new - 1):
        sequences.append(tokens)
        with timed(clock, "decode step"):
            with capturer.forward(names, [position] * args.batch):
                output = model(tokens, past_key_values=output.past_key_values, use_cache=True)
            tokens = output.logits[:, -1].argmax(dim=-1, keepdim=True)
    sequences.append(tokens)
    final = torch.cat(sequences, dim=1)
    with timed(clock, "finish"):
        for row, name in enumerate(names):
            captured = capturer.finish(name, token_ids=final[row])
            assert (captured is None) != capturer.enabled
    return clock, final


def own_time(model: Any, args: argparse.Namespace) -> float:
    """Return CPU seconds a decode step spends in the capturer: the step's calls with every router's output at hand."""
    capturer = RoutedExpertsCapturer.create(model, max_num_tokens=args.batch * args.prompt)
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [next(iter(module._forward_hooks.values())) for module in routers]
    outputs = [(None, None, torch.randint(args.experts, (args.batch, args.topk))) for _ in routers]
    names = list(range(args.batch))
    for name in names:
        capturer.add_request(name, num_prompt_tokens=1)
    times = []
    for position in range(1, 200):
        start = time.thread_time()
        with capturer.forward(names, [position] * args.batch):
            for module, hook, output in zip(routers, hooks, outputs):
                hook(module, (), output)
        times.append(time.thread_time() - start)
    capturer.close()
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in [("rounds", 8), ("hidden", 1024), ("layers", 8), ("experts", 32), ("topk", 4)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in [("batch", 16), ("prompt", 64), ("new", 16), ("threads", 1)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = build(args)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"Qwen3-MoE, {parameters / 1e6:.0f} M parameters, {args.layers} layers of {args.experts} experts, top-{args.topk}, "
        f"{args.dtype}; batch {args.batch}, {args.prompt} prompt + {args.new} new tokens, {args.threads} thread(s)"
    )
    measured: dict[bool, Clock] = {True: {}, False: {}}
    tokens = {}
    for round_number in range(args.rounds + 1):
        for enable in (True, False) if round_number % 2 else (False, True):
            capturer = RoutedExpertsCapturer.create(model, enable=enable, max_num_tokens=args.batch * args.prompt)
            clock, tokens[enable] = generate(model, args, capturer)
            capturer.close()
            if round_number:  # round 0 warms up
                for name, values in clock.items():
                    measured[enable].setdefault(name, []).extend(values)
        assert torch.equal(tokens[True], tokens[False])
    print(f"\n{'':14}{'off ms':>10}{'on ms':>10}{'on / off':>11}{'wall on / off':>15}")
    for name in ("prefill", "decode step", "finish"):
        (off_wall, off), (on_wall, on) = (
            [statistics.median(column) for column in zip(*measured[enable][name])] for enable in (False, True)
        )
        ratios = f"{on / off:>11.4f}{on_wall / off_wall:>15.4f}" if name != "finish" else ""
        print(f"{name:14}{off * 1e3:>10.3f}{on * 1e3:>10.3f}{ratios}")
    own = own_time(model, args)
    step = statistics.median(cpu for _, cpu in measured[False]["decode step"])
    print(f"\nown time of a decode step: {own * 1e6:.0f} us, {own / step:.3%} of it")


if __name__ == "__main__":
    main()
