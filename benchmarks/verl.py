"""Cost of replay in a step of verl's real Megatron engine on a CPU: this package's, and verl's own, against no replay.

    .venv-verl/bin/python -m benchmarks.verl

verl's replay patches Megatron's classes, so each kind runs in a process of its own; they take turns. CPU seconds, which load
on the machine changes less than the clock. *Preparation*: from the batch to the engine's input (verl's padding taken
out, for all kinds). *Held*: bytes of integer tensors, each storage once, when the first step's last loss is computed, beyond
those of a step without replay.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch

from benchmarks.measure import environment, table
from tests.functional.verl.batches import Sizes, as_verl, make_batch
from tests.functional.verl.cases import Case
from tests.functional.verl.engines import OurEngine, StockEngine, loss_function
from tests.support.workers import GlooWorkers

SIZES = Sizes(prompts=(16, 12) * 4, responses=(30, 22) * 4, num_columns=8, topk=8, num_experts=64)
CONFIG = {"num_layers": 8, "moe_router_topk": 8, "num_moe_experts": 64, "moe_ffn_hidden_size": 8, "hidden_size": 64}
KINDS = {"no replay": (StockEngine, "disabled"), "this package": (OurEngine, "R3"), "verl's own": (StockEngine, "R3")}
WARM_UP, STEPS, ROUNDS = 2, 6, 4


def held_bytes() -> int:
    """Return the bytes of all integer tensors that the garbage collector lists, each storage once."""
    storages = {}
    for each in gc.get_objects():
        if type(each) is torch.Tensor and not each.is_floating_point() and not each.is_nested:
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())


def measure(kind: str) -> tuple[int, list[tuple[float, float]]]:
    """Build a kind's engine and run its steps; return the bytes held, and the CPU seconds of each, (preparation, whole)."""
    engine_class, mode = KINDS[kind]
    engine = Case(config=CONFIG).engine(engine_class, mode)
    padded = make_batch(sizes=SIZES).padded
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "enable_routing_replay": mode != "disabled"}
    loss, held = loss_function(), 0

    def watched(**kwargs: Any) -> Any:
        nonlocal held
        held = held_bytes()
        return loss(**kwargs)

    seconds = []
    for number in range(WARM_UP + STEPS):
        for chunk in engine.module:
            chunk.zero_grad(set_to_none=True)
        start, whole = time.thread_time(), time.process_time()
        data = as_verl(padded, **settings)
        prepared = time.thread_time() - start
        engine.forward_backward_batch(data, watched if number == 0 else loss)
        seconds.append((prepared, time.process_time() - whole))
    return held, seconds[WARM_UP:]


def main() -> None:
    pools = {kind: GlooWorkers(1, preload=["tests.functional.verl.cases"]) for kind in KINDS}
    held: dict[str, int] = {}
    seconds: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    try:
        for _ in range(ROUNDS):
            for kind, pool in pools.items():
                ((held[kind], of_round),) = pool.run(measure, kind, timeout_s=900.0)
                seconds[kind] += of_round
    finally:
        for pool in pools.values():
            pool.close()
    rows = []
    for kind, values in seconds.items():
        ratios = [own[1] / plain[1] for own, plain in zip(values, seconds["no replay"])]
        rows.append(
            [
                kind,
                f"{statistics.median(own[0] for own in values) * 1e3:.1f}",
                f"{statistics.median(own[1] for own in values) * 1e3:.0f}",
                f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
                f"{(held[kind] - held['no replay']) / 1e3:+.1f}",
            ]
        )
    print(f"{environment()}. verl 0.9.1; {sum(SIZES.lengths)} tokens, 8 layers, top-8 of 64, 4 micro-batches.\n")
    print(table(["replay", "preparation, ms", "step, ms", "step / no replay (range)", "held, kB"], rows))


if __name__ == "__main__":
    main()
