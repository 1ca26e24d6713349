"""Samples found by the tokens of a forward, compared with a search that tries every reading of a segment."""

import os
import random
from typing import Any

import pytest
import torch

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.layout.split import split_context_parallel
from megatron_router_replay.mcore.batches.index import PrefixIndex
from megatron_router_replay.mcore.batches.locate import Located, locate
from megatron_router_replay.mcore.batches.segments import Segments

Samples = list[list[int]]
NUM_SEGMENTS = 100_000 if os.environ.get("CI_ALL") else 6_000
A, B = [5, 6, 7], [5, 8]
TURNS = [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7]]


def index_of(samples: Samples) -> PrefixIndex:
    flat = [token for sample in samples for token in sample]
    return PrefixIndex(torch.tensor(flat, dtype=torch.int32), [len(sample) for sample in samples])


def test_samples_that_begin_or_end_alike_are_rivals() -> None:
    for samples, tokens, expected in (([A, B], [5], 1), (TURNS, [1, 2], 0), ([A, A], A, 1)):
        located = locate(index_of(samples), torch.tensor(tokens), Segments.of((1, len(tokens))))
        assert located.segments()[0].has_rivals == expected
    index = index_of([*TURNS, [1, 2], [1, 2, 3]])
    assert index.rivals(0, 2, is_whole=True) == [0, 17]
    assert index.rivals(0, 1, is_whole=False) == [0, 2, 6, 12, 17, 19]
    assert index.rivals(6, 5, is_whole=False) == [6]
    assert index_of([[], A, [], [4]]).name(3) == (3, 0)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("partition", ["zigzag", "contiguous"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_ranks_of_context_parallelism_hold_what_the_split_gives_them(
    cp_size: int, partition: Any, is_packed: bool
) -> None:
    cu_seqlens = torch.tensor([0, 8, 24, 32]) if is_packed else None
    flat = torch.arange(32 if is_packed else 64).view(1 if is_packed else 2, -1)
    split: Any = {"cp_size": cp_size, "cu_seqlens_padded": cu_seqlens, "style": partition}
    parts = [split_context_parallel(flat, cp_rank=rank, **split) for rank in range(cp_size)]
    shape: Any = parts[0].shape
    segments = Segments.of(shape, cu_seqlens, cp_size=cp_size, partition=partition)
    if cp_size > 1:
        assert segments.flat is not None
        assert segments.flat.tolist() == [part.flatten().tolist() for part in parts]
    joined = segments.in_order(torch.stack([part.flatten() for part in parts]))
    assert joined.tolist() == list(range(flat.numel()))
    assert torch.equal(segments.of_rank(joined, cp_size - 1), parts[-1])


@pytest.mark.parametrize(("bad", "cp_size"), [([0, 4, 40], 1), ([1, 4], 1), ([0, 6, 4], 1), ([0, 6, 8], 2)])
def test_cu_seqlens_that_do_not_fit_raise(bad: list[int], cp_size: int) -> None:
    with pytest.raises(LayoutError, match="MRR204"):
        Segments.of((1, 8 // cp_size), torch.tensor(bad), cp_size=cp_size)


@pytest.mark.parametrize("lengths", [[0, 3], [0, 3, 5, 8], [0, 5, 8], [0, 3, 2]])
def test_lengths_that_do_not_fit_their_sequences_raise(lengths: list[int]) -> None:
    with pytest.raises(LayoutError, match=r"MRR204: cu_seqlens_q .* do not fit cu_seqlens_q_padded \[0, 4, 8\]"):
        Segments.of((1, 8), torch.tensor([0, 4, 8]), unpadded=torch.tensor(lengths))


# ---- random segments, compared with every reading that the table allows


def readings(
    segment: list[int], samples: Samples, *, padding: set[int], bound: int | None, left: bool
) -> set[tuple[int, int, int, bool]]:
    """Return every way to read a segment: (padding before, tokens of a sample, live tokens, the sample is whole)."""
    found: set[tuple[int, int, int, bool]] = set()
    segment = segment[:bound]
    if not segment or (bound is None and all(token in padding for token in segment)):
        found.add((0, 0, 0, False))
    for start in range(len(segment)) if left and bound is None else [0]:
        if any(token not in padding for token in segment[:start]):
            break
        tokens = segment[start:]
        for sample in samples:
            count = 0
            while count < min(len(sample), len(tokens)) and sample[count] == tokens[count]:
                count += 1
            if not count:
                continue
            is_whole, tail = count == len(sample), tokens[count:]
            is_padding = [bound is None and token in padding for token in tail]
            if all(is_padding):
                found.add((start, count, 0, is_whole))
            elif is_whole and all(is_padding[1:]) and tail:
                found.add((start, count, 1, True))
    return found


def random_segment(rng: random.Random, samples: Samples) -> list[int]:
    sample = list(rng.choice(samples))
    kind = rng.random()
    if kind < 0.3:
        sample = sample[: rng.randint(0, len(sample))]
    elif kind < 0.5:
        sample += [rng.randint(0, 3) for _ in range(rng.randint(1, 2))]
    elif kind < 0.6 and sample:
        sample[rng.randrange(len(sample))] = rng.randint(0, 3)
    return sample


def check(samples: Samples, segment: list[int], located: Located, at: int, **how: Any) -> str:
    """Compare with the readings; every row has the token prefix of its position."""
    possible = readings(segment, samples, **how)
    found = located.segments()[at]
    start, count, whole = found.start, found.count, bool(found.is_whole)
    case = samples, segment, how, found, possible
    if not possible:
        assert not found.is_explained, case
        return "raised"
    if not found.is_explained or found.other_starts:
        assert found.other_starts or found.num_ends > 1, case
        assert len(possible) > 1, case
        return "raised"
    assert (start, count, found.extra, whole and count > 0) in possible, case
    if count and how["bound"] is None and any(token not in how["padding"] for token in segment):
        assert {reading[0] for reading in possible} == {start}, case  # other starts would be of other rows
    flat = [(number, position) for number, sample in enumerate(samples) for position in range(len(sample))]
    for offset in range(count):
        number, position = flat[found.row + offset]
        assert position == offset, case
        assert samples[number][: offset + 1] == segment[start : start + offset + 1], case
    if count and whole:
        assert len(samples[flat[found.row][0]]) == count, case
    return "found"


@pytest.mark.parametrize("how", ["declared", "two tokens", "bounded", "packed"])
def test_random_segments_are_read_as_a_search_of_all_readings_does(how: str) -> None:
    rng, seen = random.Random(7), {"found": 0, "raised": 0}
    while sum(seen.values()) < NUM_SEGMENTS // 3:
        samples = [[rng.randint(0, 3) for _ in range(rng.randint(1, 6))] for _ in range(rng.randint(1, 5))]
        segments = [random_segment(rng, samples) for _ in range(16)]
        index, left, bounds = index_of(samples), False, [None] * len(segments)
        if how == "packed":
            padded = [segment + [0] * rng.randint(0, 3) for segment in segments]
            cu_seqlens = torch.tensor([0, *map(len, padded)]).cumsum(0)
            layout = Segments.of((1, int(cu_seqlens[-1])), cu_seqlens)
        else:
            length = max(map(len, segments)) + rng.randint(0, 2)
            left = how in ("declared", "two tokens") and rng.random() < 0.5
            fillers = [0, 1] if how == "two tokens" else [0]
            filler = [[rng.choice(fillers) for _ in range(length - len(segment))] for segment in segments]
            padded = [f + s if left else s + f for s, f in zip(segments, filler)]
            layout = Segments.of((len(padded), length))
        tokens = torch.tensor([token for segment in padded for token in segment], dtype=torch.int64)
        if how == "bounded":
            bounds = [len(segment) for segment in segments]
            layout = layout.bound(torch.tensor([[at >= bound for at in range(length)] for bound in bounds]).flatten())
        declared = {"bounded": None, "two tokens": [0, 1]}.get(how, [0])
        located = locate(index, tokens, layout, padding_token_ids=declared)
        padding = set(declared or ())
        for at, segment in enumerate(padded):
            how_to_read = {"padding": padding, "bound": bounds[at], "left": how in ("declared", "two tokens")}
            seen[check(samples, segment, located, at, **how_to_read)] += 1
    assert seen["found"] > NUM_SEGMENTS // 10
    assert seen["raised"] > NUM_SEGMENTS // 100


def test_long_segments_and_a_large_trace() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [5000, 1, 33, 32, 31, 1024, 3000]
    tokens = torch.randint(1000, (sum(lengths),), generator=generator)
    index, bounds = PrefixIndex(tokens, lengths), torch.tensor([0, *lengths]).cumsum(0)
    whole = [(tokens.numel(), Segments.of((1, tokens.numel()), bounds))]
    for num, segments in [*whole, *((cut, Segments.of((1, cut))) for cut in (1, 31, 32, 33, 4999))]:
        located = locate(index, tokens[:num], segments)
        found, _ = segments.rows(segments.start + located.start, located.count, located.row, located.extra)
        assert found.tolist() == list(range(num))
