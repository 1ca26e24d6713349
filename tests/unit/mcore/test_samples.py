"""Samples found by the tokens of a forward, compared with a search that tries every reading of a segment."""

import os
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, TraceError
from megatron_router_replay.layout.split import split_context_parallel
from megatron_router_replay.mcore.batches.hidden_states import ForwardTokens
from megatron_router_replay.mcore.batches.lookup import RowLookup
from megatron_router_replay.mcore.batches.samples import Reading, SortedSamples, keys_of, samples_of
from megatron_router_replay.mcore.batches.segments import Segments
from tests.unit.mcore.tiny_chunk import EXPERTS, random_routes

Samples = list[list[int]]
NUM_SEGMENTS = 100_000 if os.environ.get("CI_ALL") else 6_000
A, B = [5, 6, 7], [5, 8]
TURNS = [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7]]


ROUTE = random_routes(1)


def trace_of(samples: Samples) -> mrr.RoutingTrace:
    """Samples with the same routes in all rows."""
    flat = [token for sample in samples for token in sample]
    return mrr.RoutingTrace(
        topk_indices=ROUTE.expand(len(flat), -1, -1),
        layer_numbers=(1, 2, 3),
        num_experts=EXPERTS,
        token_ids=torch.tensor(flat, dtype=torch.int32),
        sequence_lengths=[len(sample) for sample in samples],
    )


def sorted_samples(samples: Samples) -> SortedSamples:
    flat = np.array([token for sample in samples for token in sample], dtype=np.int32)
    return SortedSamples(flat, [len(sample) for sample in samples], np.ones(len(flat), bool))


def read(samples: SortedSamples, tokens: list[int], doubt: int | None = None) -> Reading:
    return samples.read(0, keys_of(tokens), len(tokens), len(tokens) if doubt is None else doubt)


def test_samples_that_begin_or_end_alike_are_rivals() -> None:
    for each, tokens, expected in (([A, B], [5], True), (TURNS, [1, 2], False), ([A, A], A, True)):
        assert read(sorted_samples(each), tokens).is_ambiguous == expected
    samples = sorted_samples([*TURNS, [1, 2], [1, 2, 3]])
    for tokens, row, others in (
        ([1, 2], 0, [17]),
        ([1], 0, [2, 6, 12, 17, 19]),
        ([1, 2, 3, 4, 5], 6, []),
    ):
        found = read(samples, tokens)
        assert found.row == row
        assert sorted(samples.rivals(found, keys_of(tokens))) == [(other, len(tokens)) for other in others]
    # A shorter sample, whose end may be where padding begins.
    found = read(samples, [1, 2, 3], doubt=2)
    assert (found.row, found.known, found.ended) == (19, 3, (2,))
    assert samples.rivals(found, keys_of([1, 2, 3])) == [(0, 2)]
    samples = sorted_samples([[1, 1], [5, 6], [5, 6, 7, 8]])
    found = read(samples, [5, 6, 7], doubt=2)
    assert samples.rivals(found, keys_of([5, 6, 7])) == [(2, 2)], "also where others come before it"
    assert read(sorted_samples([[5], [5, 5, 5, 9]]), [5, 5, 5], doubt=0).ended == (1,), "a sample of one token, too"
    assert sorted_samples([[], A, [], [4]]).name(3) == (3, 0)


def test_of_samples_that_begin_alike_the_one_that_lacks_the_fewest_routes_is_used() -> None:
    has_route = np.array([False, False, True, True, True, False])
    samples = SortedSamples(np.array([1, 2, 3, 1, 2, 4], dtype=np.int32), [3, 3], has_route)
    assert samples.read(0, keys_of([1, 2]), 2, 2).row == 3


def test_samples_of_a_trace_that_changed_in_place_raise() -> None:
    trace = trace_of([A, B])
    assert samples_of(trace) is samples_of(trace)
    assert trace.token_ids is not None
    trace.token_ids[0] = 9
    with pytest.raises(TraceError, match="MRR110: token_ids"):
        samples_of(trace)


def test_what_is_read_as_one_sample_alone_is_read_so_in_full() -> None:
    rng, plain = random.Random(9), 0
    for _ in range(NUM_SEGMENTS):
        samples = sorted_samples(
            [[rng.randint(0, 2) for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 5))]
        )
        tokens = [rng.randint(0, 2) for _ in range(rng.randint(1, 6))]
        real = rng.randint(1, len(tokens))
        how = (1, keys_of(tokens), real, rng.randint(0, real))
        if (found := samples.read_plain(*how)) is not None:
            assert found == samples.read(*how)
            assert not found.is_ambiguous
            plain += 1
    assert plain > NUM_SEGMENTS // 10


def test_tokens_inside_a_sample_are_found_at_whole_tokens() -> None:
    samples = sorted_samples([[1, 256, 65536], [3, 1, 2]])
    assert samples.locate_inside(keys_of([1, 2])) == (1, 1)
    assert samples.locate_inside(keys_of([256, 65536])) == (0, 1)
    assert samples.locate_inside(keys_of([1])) == (1, 1)
    assert samples.locate_inside(keys_of([1 << 24 | 1])) is None
    # The last byte of 256 and the first seven of two zeros are alike, too.
    assert sorted_samples([[256, 0, 0, 9]]).locate_inside(keys_of([0, 0])) == (0, 1)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("partition", ["zigzag", "contiguous"])
@pytest.mark.parametrize("is_packed", [False, True])
def test_ranks_of_context_parallelism_hold_what_the_split_gives_them(
    cp_size: int, partition: Any, is_packed: bool
) -> None:
    cu_seqlens = torch.tensor([0, 8, 24, 32]) if is_packed else None
    flat = torch.arange(32 if is_packed else 64).view(1 if is_packed else 2, -1)
    split: Any = {"cp_size": cp_size, "cu_seqlens_padded": cu_seqlens}
    parts = [split_context_parallel(flat, cp_rank=rank, **split) for rank in range(cp_size)]
    if partition == "contiguous":
        parts = list(flat.chunk(cp_size, dim=1))
    shape: Any = parts[0].shape
    segments = Segments.of(shape, cu_seqlens, cp_size=cp_size, partition=partition)
    if cp_size > 1:
        assert segments.flat.tolist() == [part.flatten().tolist() for part in parts]
    joined = segments.in_order(np.stack([part.flatten().numpy() for part in parts]))
    assert joined.tolist() == list(range(flat.numel()))
    assert torch.equal(segments.of_rank(joined, cp_size - 1), parts[-1])


def test_the_rest_of_a_packed_row_may_have_an_odd_number_of_positions_on_each_rank() -> None:
    segments = Segments.of((1, 7), torch.tensor([0, 8]), cp_size=2)
    # In halves, as zigzag cuts a sequence, these three positions would overlap.
    assert segments.flat.tolist() == [[0, 1, 6, 7, 8, 9, 10], [2, 3, 4, 5, 11, 12, 13]]


@pytest.mark.parametrize(("bad", "cp_size"), [([0, 4, 40], 1), ([1, 4], 1), ([0, 6, 4], 1), ([0, 6, 8], 2)])
def test_cu_seqlens_that_do_not_fit_raise(bad: list[int], cp_size: int) -> None:
    with pytest.raises(LayoutError, match="MRR204"):
        Segments.of((1, 8 // cp_size), torch.tensor(bad), cp_size=cp_size)


@pytest.mark.parametrize("lengths", [[0, 3], [0, 3, 5, 8], [0, 5, 8], [0, 3, 2]])
def test_lengths_that_do_not_fit_their_sequences_raise(lengths: list[int]) -> None:
    with pytest.raises(LayoutError, match=r"MRR204: cu_seqlens_q .* do not fit cu_seqlens_q_padded \[0, 4, 8\]"):
        Segments.of((1, 8), torch.tensor([0, 4, 8]), unpadded=torch.tensor(lengths))


def test_a_packed_row_has_no_tokens_after_its_last_sequence() -> None:
    segments = Segments.of((1, 8), torch.tensor([0, 4, 6]))
    assert (segments.begin.tolist(), segments.stop.tolist(), segments.end.tolist()) == ([0, 4, 6], [4, 6, 6], [4, 6, 8])


def test_positions_begin_a_segment_where_they_fall_to_0_and_not_where_they_stay_there() -> None:
    segments = Segments.of((2, 6)).cut(np.array([0, 1, 2, 0, 1, 0, 0, 1, 2, 3, 0, 0]))
    assert segments.begin.tolist() == [0, 3, 5, 6, 10]


def test_a_mask_and_unpadded_lengths_both_end_a_segment() -> None:
    segments = Segments.of((1, 8), torch.tensor([0, 4, 8]), unpadded=torch.tensor([0, 3, 6]))
    mask = np.array([False, False, True, True, True, False, False, False])
    bounded = segments.with_lengths(mask)
    # The mask ends the first one after 2 of its 3 tokens; the second one has 3, whatever the mask leaves.
    assert (bounded.start.tolist(), bounded.stop.tolist()) == ([0, 5, 8], [2, 7, 8])
    assert segments.with_lengths(np.zeros(8, bool)).stop.tolist() == [3, 7, 8]


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


def check(samples: Samples, segment: list[int], found: Reading | str, **how: Any) -> str:
    """Compare with the readings; every row has the token prefix of its position."""
    possible = readings(segment, samples, **how)
    case = samples, segment, how, found, possible
    if isinstance(found, str):
        assert not possible or ("may be padding or may belong" in found and len({each[0] for each in possible}) > 1), (
            case
        )
        return "raised"
    start, count = found.start, found.known
    assert (start, count, found.live, found.is_whole and count > 0) in possible, case
    is_padding = how["bound"] is None and all(token in how["padding"] for token in segment)
    assert count == (0 if is_padding else max(each[1] for each in possible if each[0] == start)), case  # the longest
    if count and how["bound"] is None:
        assert {reading[0] for reading in possible} == {start}, case  # other starts would be of other rows
    flat = [(number, position) for number, sample in enumerate(samples) for position in range(len(sample))]
    for offset in range(count):
        number, position = flat[found.row + offset]
        assert position == offset, case
        assert samples[number][: offset + 1] == segment[start : start + offset + 1], case
    if count and found.is_whole:
        assert len(samples[flat[found.row][0]]) == count, case
    return "found"


def read_all(lookup: RowLookup, layout: Segments, tokens: Any) -> list[Reading | str]:
    """Read each segment by itself, for an error is of the whole forward."""
    found: list[Reading | str] = []
    for number in range(len(layout.begin)):
        only = slice(number, number + 1)
        alone = replace(layout, **{name: getattr(layout, name)[only] for name in ("begin", "end", "start", "stop")})
        try:
            found += lookup._read(ForwardTokens(segments=alone, tokens=tokens, layout=alone), "here")
        except LayoutError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("how", ["declared", "two tokens", "bounded", "packed"])
def test_random_segments_are_read_as_a_search_of_all_readings_does(how: str) -> None:
    rng, seen = random.Random(7), {"found": 0, "raised": 0}
    while sum(seen.values()) < NUM_SEGMENTS // 3:
        samples = [[rng.randint(0, 3) for _ in range(rng.randint(1, 6))] for _ in range(rng.randint(1, 5))]
        segments = [random_segment(rng, samples) for _ in range(16)]
        left, bounds = False, [None] * len(segments)
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
        tokens = np.array([token for segment in padded for token in segment], dtype=np.int64)
        if how == "bounded":
            bounds = [len(segment) for segment in segments]
            layout = layout.with_lengths(
                np.array([[at >= bound for at in range(length)] for bound in bounds]).flatten()
            )
        declared = {"bounded": None, "two tokens": [0, 1]}.get(how, [0])
        lookup = RowLookup(trace_of(samples), padding_token_ids=declared, cp_partition_mode=None)
        for at, (segment, found) in enumerate(zip(padded, read_all(lookup, layout, tokens))):
            how_to_read = {
                "padding": set(declared or ()),
                "bound": bounds[at],
                "left": how in ("declared", "two tokens"),
            }
            seen[check(samples, segment, found, **how_to_read)] += 1
    assert seen["found"] > NUM_SEGMENTS // 10
    assert seen["raised"] > NUM_SEGMENTS // 100


def test_undeclared_padding_is_read_as_tokens_of_a_sample_or_raises() -> None:
    """A whole sample, then one token that repeats, not declared: no reading takes two of it for padding."""
    rng, seen = random.Random(8), {"found": 0, "raised": 0}
    while sum(seen.values()) < NUM_SEGMENTS // 3:
        samples = [[rng.randint(0, 3) for _ in range(rng.randint(1, 6))] for _ in range(rng.randint(1, 5))]
        segment = random_segment(rng, samples) + [0] * rng.randint(0, 3)
        tokens = np.array(segment, dtype=np.int64)
        lookup = RowLookup(trace_of(samples), padding_token_ids=None, cp_partition_mode=None)
        (found,) = read_all(lookup, Segments.of((1, len(segment))), tokens) if segment else ("",)
        seen[check(samples, segment, found, padding=set(), bound=len(segment), left=False) if segment else "found"] += 1
    assert min(seen.values()) > NUM_SEGMENTS // 30


def test_long_segments_and_a_large_trace() -> None:
    rng = np.random.default_rng(0)
    lengths = [5000, 1, 33, 32, 31, 1024, 3000]
    tokens = rng.integers(1000, size=sum(lengths))
    trace = mrr.RoutingTrace(
        topk_indices=ROUTE.expand(len(tokens), -1, -1),
        layer_numbers=(1, 2, 3),
        num_experts=EXPERTS,
        token_ids=tokens,
        sequence_lengths=lengths,
    )
    lookup = RowLookup(trace, padding_token_ids=[], cp_partition_mode=None)
    whole = [(tokens.size, Segments.of((1, tokens.size), np.cumsum([0, *lengths])))]
    for num, segments in [*whole, *((cut, Segments.of((1, cut))) for cut in (1, 31, 32, 33, 4999))]:
        found = lookup._read(ForwardTokens(segments=segments, tokens=tokens[:num], layout=segments), "here")
        start, known, row, live = (np.array([each[at] for each in found]) for at in range(4))
        rows, padding = segments.rows(segments.start + start, known, row, live)
        assert rows.tolist() == list(range(num))
        assert padding is None
