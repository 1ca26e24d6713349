"""Cost of finding rows by tokens: the index of a trace beside torch.sort, a forward's rows beside rows given by hand.

python -m benchmarks.follow
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_router_replay.mcore.batches.index import PrefixIndex
from megatron_router_replay.mcore.batches.locate import locate
from megatron_router_replay.mcore.batches.segments import Segments

LENGTH = 512
"""Tokens of a sample."""


class _Count(TorchDispatchMode):
    """Counts the operations that reach the device."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.number += 1
        return function(*args, **(kwargs or {}))


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call."""
    call()
    taken = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return 1000 * median(taken)


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    print("| rows of the trace | index | torch.sort of as many int64 | ratio | bytes a row |")
    print("| --- | --- | --- | --- | --- |")
    for num_rows in (1 << 18, 1 << 20, 1 << 22):
        tokens = torch.randint(150_000, (num_rows,), generator=generator, dtype=torch.int32)
        lengths, repeats = [LENGTH] * (num_rows // LENGTH), 3
        made = milliseconds(partial(PrefixIndex, tokens, lengths), repeats)
        keys = torch.randint(-(1 << 62), 1 << 62, (num_rows,), generator=generator)
        plain = milliseconds(keys.sort, repeats)
        nbytes = PrefixIndex(tokens, lengths).nbytes / num_rows
        print(f"| {num_rows:,} | {made:.0f} ms | {plain:.0f} ms | {made / plain:.1f} | {nbytes:.1f} |")

    num_rows = 1 << 18
    tokens = torch.randint(1, 150_000, (num_rows,), generator=generator, dtype=torch.int32)
    index = PrefixIndex(tokens, [LENGTH] * (num_rows // LENGTH))
    samples = tokens.view(-1, LENGTH).long()
    print("\n| forward | rows found | operations |\n| --- | --- | --- |")
    for name, num_samples in (("8,192 tokens", 16), ("131,072 tokens", 256)):
        chosen = samples[torch.randperm(len(samples), generator=generator)[:num_samples]]
        packed = chosen.reshape(-1)
        bounds = torch.arange(num_samples + 1) * LENGTH
        padded = torch.nn.functional.pad(chosen[:, : LENGTH - 64], (0, 64))
        batches = {
            "packed": (packed, Segments.of((1, packed.numel()), bounds)),
            "padded": (padded.reshape(-1), Segments.of((num_samples, LENGTH))),
        }
        for kind, (ids, segments) in batches.items():

            def find(ids: torch.Tensor = ids, segments: Segments = segments) -> object:
                located = locate(index, ids, segments)
                return located.rows(segments, located.extra)

            with _Count() as count:
                find()
            print(f"| {name}, {kind} | {milliseconds(find, 20):.2f} ms | {count.number} |")


if __name__ == "__main__":
    main()
