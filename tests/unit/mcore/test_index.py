"""Samples found by the tokens of a forward, beside a search that tries every reading of a segment."""

import os
import random

import pytest
import torch

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.mcore.batches.index import PrefixIndex
from megatron_router_replay.mcore.batches.judge import PaddingEvidence
from megatron_router_replay.mcore.batches.locate import Located, locate
from megatron_router_replay.mcore.batches.segments import Segments

Samples = list[list[int]]
NUM_SEGMENTS = 100_000 if os.environ.get("CI_ALL") else 6_000


def index_of(samples: Samples) -> PrefixIndex:
    flat = [token for sample in samples for token in sample]
    return PrefixIndex(torch.tensor(flat, dtype=torch.int32), [len(sample) for sample in samples])


def find(samples: Samples, *rows: list[int], declared: list[int] | None = None, mask: object = None) -> Located:
    """Locate a padded batch; the last, empty segment is left out."""
    segments = Segments.of((len(rows), len(rows[0])))
    if mask is not None:
        segments = segments.bound(torch.tensor(mask).flatten().bool())
    padding = None if declared is None else torch.tensor(declared)
    located = locate(index_of(samples), torch.tensor(rows).flatten(), segments, padding_token_ids=padding)
    return Located(*(each[:-1] for each in located))


def place(located: Located, segments: Segments) -> tuple[torch.Tensor, torch.Tensor | None]:
    return segments.rows(segments.start + located.start, located.count, located.row, located.extra)


def rows_of(samples: Samples, *rows: list[int], **options: object) -> tuple[list[list[int]], list[list[bool]]]:
    segments = Segments.of((len(rows), len(rows[0])))
    if (mask := options.pop("mask", None)) is not None:
        segments = segments.bound(torch.tensor(mask).flatten().bool())
    options["padding_token_ids"] = torch.tensor(declared) if (declared := options.pop("declared", None)) else None
    located = locate(index_of(samples), torch.tensor(rows).flatten(), segments, **options)  # type: ignore[arg-type]
    assert located.is_explained.tolist() == [1] * (len(rows) + 1)
    found, padding = place(located, segments)
    padding = torch.zeros_like(found, dtype=torch.bool) if padding is None else padding
    return segments.of_rank(found, 0).tolist(), segments.of_rank(padding, 0).tolist()


def shown(located: Located, at: int = 0) -> dict[str, int]:
    """What a segment shows of the padding token: kind -> token."""
    segment = located.segments()[at]
    if segment.other_starts and segment.start:
        return {"doubt": "before"}  # type: ignore[dict-item]
    evidence = PaddingEvidence()
    evidence.add(segment, lambda: "here")
    return {name: next(iter(tokens)) for name, tokens in vars(evidence).items() if tokens}


A, B = [5, 6, 7], [5, 8]
"""Rows 0, 1, 2 and 3, 4."""


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([5, 6, 7, 0, 0], [0, 1, 2, -1, -1]),
        ([0, 0, 5, 6, 7], [-1, -1, 0, 1, 2]),
        ([5, 8, 0, 0, 0], [3, 4, -1, -1, -1]),
        ([0, 5, 8, 0, 0], [-1, 3, 4, -1, -1]),
        ([0, 0, 0, 0, 0], [-1, -1, -1, -1, -1]),
    ],
)
def test_whole_samples_and_padding(row: list[int], expected: list[int]) -> None:
    assert rows_of([A, B], row) == ([expected], [[each < 0 for each in expected]])


def test_cut_on_the_right_takes_the_first_sample_that_begins_so() -> None:
    located = find([A, B], [5])
    assert (located.row.tolist(), located.count.tolist(), located.has_rivals.tolist()) == ([0], [1], [1])
    assert rows_of([A, B], [5, 6]) == ([[0, 1]], [[False, False]])


def test_one_token_more_is_live_and_not_padding() -> None:
    assert rows_of([A, B], [5, 8, 9, 0, 0]) == ([[3, 4, -1, -1, -1]], [[False, False, False, True, True]])
    located = find([A], [5, 6, 7, 9])
    # Appended or padding: only other forwards can say.
    assert (located.extra.tolist(), located.padding.tolist(), located.is_whole.tolist()) == ([0], [1], [1])
    assert shown(located) == {}


@pytest.mark.parametrize(
    ("row", "count", "is_whole"),
    [([5, 6, 7, 9, 8, 3], 3, 1), ([5, 6, 9, 9, 7], 2, 0), ([6, 7, 5, 5, 6], 0, 0), ([9, 9, 6, 7, 6], 0, 0)],
)
def test_other_tokens_are_not_explained(row: list[int], count: int, is_whole: int) -> None:
    located = find([A, B], row)
    assert (located.is_explained.tolist(), located.count.tolist(), located.is_whole.tolist()) == (
        [0],
        [count],
        [is_whole],
    )


def test_padding_behind_the_beginning_of_a_sample_waits_for_proof() -> None:
    assert shown(find([A, B], [5, 6, 9, 9, 9])) == {"weak": 9}
    assert shown(find([A, B], [5, 6, 7, 9, 9])) == {"strong": 9}
    assert find([A, B], [5, 6, 9, 9, 9], declared=[0]).is_explained.tolist() == [0]


def test_the_end_of_a_segment_names_the_sample() -> None:
    turns = [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7]]
    assert rows_of(turns, [1, 2, 3, 4, 7, 0, 0]) == ([[12, 13, 14, 15, 16, -1, -1]], [[False] * 5 + [True] * 2])
    assert rows_of(turns, [1, 2, 3, 4])[0] == [[2, 3, 4, 5]]
    assert rows_of(turns, [1, 2])[0] == [[0, 1]]
    assert find(turns, [1, 2]).has_rivals.tolist() == [0]  # one sample ends here
    assert find([A, A], A).has_rivals.tolist() == [1]
    index = index_of([*turns, [1, 2], [1, 2, 3]])
    assert index.rivals(0, 2, is_whole=True) == [0, 17]
    assert index.rivals(0, 1, is_whole=False) == [0, 2, 6, 12, 17, 19]
    assert index.rivals(6, 5, is_whole=False) == [6]


def test_padding_that_continues_another_sample_is_disputed() -> None:
    samples = [[5, 6, 7], [5, 6, 7, 0, 9]]
    assert shown(find(samples, [5, 6, 7, 0])) == {"disputed": 0}
    assert shown(find(samples, [5, 6, 7, 0, 0])) == {"disputed": 0, "weak": 0}
    assert shown(find(samples, [5, 6, 7, 0, 9])) == {}
    located = find([A, [5, 6, 7, 0], [5, 6, 7, 0, 0]], [5, 6, 7, 0, 0])  # three samples end where padding may begin
    assert (located.num_ends.tolist(), located.is_explained.tolist(), shown(located)) == ([3], [1], {"disputed": 0})
    assert rows_of(samples, [5, 6, 7, 0, 0], declared=[0])[0] == [[0, 1, 2, -1, -1]]
    assert rows_of(samples, [5, 6, 7, 0, 0], mask=[0, 0, 0, 1, 1])[0] == [[0, 1, 2, -1, -1]]
    assert rows_of(samples, [5, 6, 7, 0, 1], mask=[0, 0, 0, 0, 1])[0] == [[3, 4, 5, 6, -1]]
    located = find([A, [5, 6, 7, 0]], [5, 6, 7, 0], declared=[0])
    assert (located.num_ends.tolist(), located.is_explained.tolist()) == ([2], [0])


def test_padding_on_both_sides_is_one_token_or_declared() -> None:
    assert rows_of([A, B], [9, 9, 5, 6, 7, 9])[0] == [[-1, -1, 0, 1, 2, -1]]
    located = find([A, B], [9, 9, 5, 6, 7, 0, 0])
    assert (located.first.tolist(), located.last.tolist(), located.is_explained.tolist()) == ([9], [0], [0])
    assert rows_of([A, B], [9, 9, 5, 6, 7, 0, 0], declared=[0, 9])[0] == [[-1, -1, 0, 1, 2, -1, -1]]


def test_a_sample_that_begins_with_the_padding_token() -> None:
    samples = [[0, 0, 5], [0, 6]]
    assert rows_of(samples, [0, 0, 0, 0, 5])[0] == [[-1, -1, 0, 1, 2]]
    assert rows_of(samples, [0, 6, 0, 0, 0])[0] == [[3, 4, -1, -1, -1]]
    assert rows_of(samples, [0, 0, 0, 0, 6])[0] == [[-1, -1, -1, 3, 4]]


def test_a_beginning_that_may_be_padding_is_no_silent_choice() -> None:
    samples = [[0, 5, 6], [5, 6]]
    assert shown(find(samples, [0, 0, 5, 6])) == {"doubt": "before"}
    located = find(samples, [0, 5, 6])
    assert (located.row.tolist(), shown(located)) == ([0], {"excluded": 0})
    assert find(samples, [0, 5, 6], declared=[0]).other_starts.tolist() == [1]
    assert shown(find([[0, 0, 5], [0, 5]], [0, 0, 5])) == {"excluded": 0}
    # Nine samples begin with 1 to 9 equal tokens: all of these beginnings are tried.
    runs = [[7] * length + [length] for length in range(1, 9)]
    assert shown(find([*runs, [0] * 9 + [5, 6], [5, 6]], [0] * 12 + [5, 6])) == {"doubt": "before"}
    assert rows_of(samples, [0, 0, 5, 6], mask=[1, 1, 0, 0])[0] == [[-1, -1, 3, 4]]
    assert rows_of(samples, [0, 0, 5, 6], mask=[1, 0, 0, 0])[0] == [[-1, 0, 1, 2]]


def test_within_a_known_length_no_token_is_padding() -> None:
    assert find([A], [5, 6, 7, 0, 0, 0], mask=[0, 0, 0, 0, 0, 1]).is_explained.tolist() == [0]
    assert rows_of([A], [5, 6, 7, 0, 3, 9], mask=[0, 0, 0, 0, 1, 1]) == (
        [[0, 1, 2, -1, -1, -1]],
        [[False, False, False, False, True, True]],
    )
    # A mask of the padding token also covers such tokens inside a sample, and at its end.
    assert rows_of([[5, 0, 7, 0]], [5, 0, 7, 0, 0, 0], mask=[0, 1, 0, 1, 1, 1])[0] == [[0, 1, 2, -1, -1, -1]]


def test_packed_sequences_with_and_without_known_lengths() -> None:
    samples, tokens = [A, B], torch.tensor([5, 6, 7, 0, 5, 8, 0, 0, 0, 0])
    cu_seqlens = torch.tensor([0, 4, 8])
    for unpadded, strong in ((None, {"strong": 0}), (cu_seqlens, {"strong": 0}), (torch.tensor([0, 3, 5]), {})):
        segments = Segments.of((1, 10), cu_seqlens, unpadded=unpadded)
        located = locate(index_of(samples), tokens, segments)
        assert place(located, segments)[0].tolist() == [0, 1, 2, -1, 3, 4, -1, -1, -1, -1]
        assert [shown(located, at) for at in range(3)] == [{}, strong, {}]
        assert located.is_explained.tolist() == [1, 1, 1]


def test_restarts_of_positions_are_segments() -> None:
    segments = Segments.of((2, 6))
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [1, 1, 0, 1, 2, 0]])
    tokens = torch.tensor([[5, 6, 7, 5, 8, 9], [9, 9, 5, 6, 7, 9]])
    cut = segments.cut(positions.flatten())
    assert cut.begin.tolist() == [0, 3, 5, 6, 8, 11, 12]
    located = locate(index_of([A, B]), tokens.flatten(), cut)
    assert place(located, cut)[0].view(2, 6).tolist() == [[0, 1, 2, 3, 4, -1], [-1, -1, 0, 1, 2, -1]]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("partition", ["zigzag", "contiguous"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_ranks_of_context_parallelism_hold_what_the_split_gives_them(
    cp_size: int, partition: str, is_packed: bool
) -> None:
    from megatron_router_replay.layout.split import split_context_parallel

    cu_seqlens = torch.tensor([0, 8, 24, 32]) if is_packed else None
    flat = torch.arange(32 if is_packed else 64).view(1 if is_packed else 2, -1)
    split = {"cp_size": cp_size, "cu_seqlens_padded": cu_seqlens, "style": partition}
    parts = [split_context_parallel(flat, cp_rank=rank, **split) for rank in range(cp_size)]  # type: ignore[arg-type]
    segments = Segments.of(parts[0].shape, cu_seqlens, cp_size=cp_size, partition=partition)  # type: ignore[arg-type]
    if cp_size > 1:
        assert segments.flat is not None
        assert segments.flat.tolist() == [part.flatten().tolist() for part in parts]
    joined = segments.in_order(torch.stack([part.flatten() for part in parts]))
    assert joined.tolist() == list(range(flat.numel()))
    assert torch.equal(segments.of_rank(joined, cp_size - 1), parts[-1])


def test_cu_seqlens_that_do_not_fit_raise() -> None:
    for bad, cp_size in (([0, 4, 40], 1), ([1, 4], 1), ([0, 6, 4], 1), ([0, 6, 8], 2)):
        with pytest.raises(LayoutError, match="MRR204"):
            Segments.of((1, 8 // cp_size), torch.tensor(bad), cp_size=cp_size)


def test_an_empty_trace_and_empty_samples() -> None:
    assert find([], [1, 2, 3]).is_explained.tolist() == [0]
    assert find([[], []], [0, 0]).is_explained.tolist() == [1]
    assert rows_of([[], A, [], [4]], [5, 6, 7, 0, 0], [4, 0, 0, 0, 0])[0] == [[0, 1, 2, -1, -1], [3, -1, -1, -1, -1]]
    assert index_of([[], A, [], [4]]).name(3) == (3, 0)


# ---- random segments, beside every reading that the table allows


def readings(
    segment: list[int], samples: Samples, *, padding: set[int], bound: int | None, left: bool
) -> set[tuple[int, int, int, bool]]:
    """Every way to read a segment: (padding before, tokens of a sample, live tokens, the sample is whole)."""
    found: set[tuple[int, int, int, bool]] = set()
    segment = segment[:bound]
    if bound is None and all(token in padding for token in segment):
        found.add((0, 0, 0, False))
    if not segment:
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


def check(samples: Samples, segment: list[int], located: Located, at: int, **how: object) -> str:
    """Compare with the readings; every row has the token prefix of its position."""
    possible = readings(segment, samples, **how)  # type: ignore[arg-type]
    found = located.segments()[at]
    start, count, live, whole, row = found.start, found.count, found.extra, bool(found.is_whole), found.row
    if not possible:
        assert not found.is_explained, (samples, segment, how)
        return "raised"
    if not found.is_explained or found.other_starts:
        assert found.other_starts or found.num_ends > 1, (samples, segment, how, found)
        assert len(possible) > 1, (samples, segment, how, possible)
        return "raised"
    assert (start, count, live, whole and count > 0) in possible, (samples, segment, how, start, count, live, whole)
    flat = [(token, number, position) for number, s in enumerate(samples) for position, token in enumerate(s)]
    for offset in range(count):
        _, number, position = flat[row + offset]
        assert position == offset, (samples, segment, how)
        assert samples[number][: offset + 1] == segment[start : start + offset + 1], (samples, segment, how)
    if count and whole:
        assert len(samples[flat[row][1]]) == count, (samples, segment, how)
    return "found"


@pytest.mark.parametrize("how", ["declared", "bounded", "packed"])
def test_random_segments_are_read_as_a_search_of_all_readings_does(how: str) -> None:
    rng, seen = random.Random(7), {"found": 0, "raised": 0}
    while sum(seen.values()) < NUM_SEGMENTS // 3:
        samples = [[rng.randint(0, 3) for _ in range(rng.randint(1, 6))] for _ in range(rng.randint(1, 5))]
        segments = [random_segment(rng, samples) for _ in range(16)]
        index = index_of(samples)
        if how == "packed":
            padded = [segment + [0] * rng.randint(0, 3) for segment in segments]
            cu_seqlens = torch.tensor([0, *map(len, padded)]).cumsum(0)
            layout = Segments.of((1, int(cu_seqlens[-1])), cu_seqlens)
            located = locate(index, torch.tensor([t for s in padded for t in s]), layout, padding_token_ids=ZERO)
            for at, segment in enumerate(padded):
                seen[check(samples, segment, located, at, padding={0}, bound=None, left=False)] += 1
            continue
        length = max(map(len, segments)) + rng.randint(0, 2)
        left = how == "declared" and rng.random() < 0.5
        filler = [[0] * (length - len(segment)) for segment in segments]
        padded = [f + s if left else s + f for s, f in zip(segments, filler)]
        layout = Segments.of((len(padded), length))
        tokens = torch.tensor(padded, dtype=torch.int64).flatten()
        if how == "bounded":
            mask = torch.tensor([[False] * len(s) + [True] * len(f) for s, f in zip(segments, filler)]).flatten()
            located = locate(index, tokens, layout.bound(mask))
            for at, segment in enumerate(segments):
                bound = len(segment)
                seen[check(samples, padded[at], located, at, padding=set(), bound=bound, left=False)] += 1
            continue
        located = locate(index, tokens, layout, padding_token_ids=ZERO)
        for at, segment in enumerate(padded):
            seen[check(samples, segment, located, at, padding={0}, bound=None, left=True)] += 1
    assert seen["found"] > NUM_SEGMENTS // 10
    assert seen["raised"] > NUM_SEGMENTS // 100


ZERO = torch.tensor([0])


def test_long_segments_and_a_large_trace() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = [5000, 1, 33, 32, 31, 1024, 3000]
    tokens = torch.randint(1000, (sum(lengths),), generator=generator)
    index, bounds = PrefixIndex(tokens, lengths), torch.tensor([0, *lengths]).cumsum(0)
    segments = Segments.of((1, tokens.numel()), bounds)
    located = locate(index, tokens, segments)
    assert torch.equal(place(located, segments)[0], torch.arange(tokens.numel()))
    for cut in (1, 31, 32, 33, 4999):
        segments = Segments.of((1, cut))
        located = locate(index, tokens[:cut], segments)
        assert place(located, segments)[0].tolist() == list(range(cut))
