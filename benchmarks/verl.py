"""What replay adds to a step of verl's real Megatron engine on a CPU: this package's, and verl's own, beside no replay.

    .venv-verl/bin/python -m benchmarks.verl

Each replay runs in a process of its own, for verl's patches Megatron's classes; rounds alternate. CPU seconds, which load on
the machine changes less than the clock. Bytes: integer tensors that Python holds when the first step's last loss is computed,
beyond those of a step without replay.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import torch

from megatron_router_replay.testing import GlooWorkers
from tests.functional.verl.batches import Sizes, as_verl, make_batch
from tests.functional.verl.cases import Case
from tests.functional.verl.engines import OurEngine, StockEngine, loss_function

SIZES = Sizes(prompts=(24, 16) * 4, responses=(40, 30) * 4, num_columns=24, topk=8, num_experts=64)
CONFIG = {"num_layers": 24, "moe_router_topk": 8, "num_moe_experts": 64, "moe_ffn_hidden_size": 8, "hidden_size": 64}
KINDS = {"no replay": (StockEngine, "disabled"), "this package": (OurEngine, "R3"), "verl's own": (StockEngine, "R3")}
_engines: dict[str, Any] = {}


def held_bytes() -> int:
    """Bytes of all integer tensors that Python holds, each storage once."""
    storages = {}
    for each in gc.get_objects():
        if type(each) is torch.Tensor and not each.is_floating_point() and not each.is_nested:
            storages[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
    return sum(storages.values())


def measure(kind: str, steps: int) -> dict[str, Any]:
    """CPU seconds of each of some steps, and the bytes at their last loss."""
    engine_class, mode = KINDS[kind]
    engine = Case(config=CONFIG).engine(engine_class, mode)
    padded = make_batch(SIZES).padded
    seconds, held = [], [0]
    loss = loss_function()

    def watched(**kwargs: Any) -> Any:
        held[0] = held_bytes()
        return loss(**kwargs)

    for number in range(steps + 2):
        data = as_verl(
            padded, use_dynamic_bsz=False, micro_batch_size_per_gpu=2, enable_routing_replay=mode != "disabled"
        )
        for chunk in engine.module:
            chunk.zero_grad(set_to_none=True)
        start = time.process_time()
        engine.forward_backward_batch(data, watched if number == 0 else loss)
        seconds.append(time.process_time() - start)
    return {"seconds": seconds[2:], "held": held[0]}


def main(rounds: int = 3, steps: int = 4) -> None:
    preload = ["tests.functional.verl.cases"]
    pools = {kind: GlooWorkers(1, preload=preload) for kind in KINDS}
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    held: dict[str, int] = {}
    try:
        for _ in range(rounds):
            for kind, pool in pools.items():
                (result,) = pool.run(measure, kind, steps, timeout_s=900.0)
                seconds[kind] += result["seconds"]
                held[kind] = result["held"]
    finally:
        for pool in pools.values():
            pool.close()
    base = statistics.median(seconds["no replay"])
    print(f"{sum(SIZES.lengths)} tokens, 24 layers, top 8 of 64, 4 micro-batches; median of {rounds * steps} steps")
    for kind, values in seconds.items():
        median = statistics.median(values)
        print(
            f"{kind:14} step {median:7.3f} CPU s   added {median - base:+7.3f} s   "
            f"integer tensors held {(held[kind] - held['no replay']) / 1e6:+.2f} MB"
        )


if __name__ == "__main__":
    main()
