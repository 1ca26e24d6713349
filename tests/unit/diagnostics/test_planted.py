"""diff_traces states a fault that was planted into a noisy pair of traces, and no fact of plain noise.

A token's route follows from its embedding, its neighbours and each layer's weights; the second run adds noise to the
logits until a share of decisions names a different set.
"""

import os
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import pytest
import torch

import megatron_router_replay as mrr

# Share of decisions that noise changes, topk, experts.
LEVELS = [(0.05, 4, 32), (0.02, 4, 32), (0.08, 8, 128)][: 3 if os.environ.get("CI_ALL") else 1]
LENGTHS = (70, 96, 122, 60, 151, 96, 88, 133, 96, 77)
STARTS = [0, *accumulate(LENGTHS)]
LAYERS = range(2, 10)


@dataclass
class Pair:
    """Routes [num_tokens, num_layers, topk] of two runs, and the samples and mask of the second trace."""

    a: torch.Tensor
    b: torch.Tensor
    num_experts: int
    lengths: tuple[int, ...] = LENGTHS
    mask: torch.Tensor | None = None

    def diff(self, **lengths):
        numbers = {"layer_numbers": LAYERS[: self.a.shape[1]], "num_experts": self.num_experts}
        one = mrr.RoutingTrace(topk_indices=self.a, **numbers, **(lengths or {"sequence_lengths": LENGTHS}))
        lengths = lengths or {"sequence_lengths": self.lengths}
        return mrr.diff_traces(one, mrr.RoutingTrace(topk_indices=self.b, replay_mask=self.mask, **numbers, **lengths))


def logits_of(num_layers, num_experts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    vocabulary, width, length = 400, 48, sum(LENGTHS)
    tokens = torch.multinomial(1.0 / torch.arange(1, vocabulary + 1), length, replacement=True, generator=generator)
    hidden = torch.randn(vocabulary, width, generator=generator)[tokens]
    context = torch.randn(length, width, generator=generator)
    for i in range(1, length):
        context[i] = 0.6 * context[i - 1] + 0.8 * context[i]
    weights = torch.randn(num_layers, width, num_experts, generator=generator) / width**0.5
    popularity = 0.5 * torch.randn(num_layers, 1, num_experts, generator=generator)
    return ((hidden + context) @ weights + popularity).transpose(0, 1)


@cache
def noisy_routes(shares, topk, num_experts):
    """Return the routes of both runs; noise in each layer changes this share of its decisions."""
    logits = logits_of(len(shares), num_experts)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(9))
    a = logits.topk(topk, dim=2).indices
    b = a.clone()
    for layer, share in enumerate(shares):
        low, high = 0.0, 8.0
        for _ in range(14):
            middle = (low + high) / 2
            b[:, layer] = (logits[:, layer] + middle * noise[:, layer]).topk(topk, dim=1).indices
            changed = (b[:, layer].sort(dim=1).values != a[:, layer].sort(dim=1).values).any(dim=1).double().mean()
            low, high = (middle, high) if changed < share else (low, middle)
    return a, b


def noisy_pair(shares, topk, num_experts):
    shares = tuple(shares) if isinstance(shares, list) else (shares,) * 8
    a, b = noisy_routes(shares, topk, num_experts)
    return Pair(a=a.clone(), b=b.clone(), num_experts=num_experts)


def sample(index):
    return slice(STARTS[index], STARTS[index + 1])


def shift_a_layer_from_a_row_on(pair):
    pair.b[502:, 3] = pair.b[500:-2, 3].clone()


def lose_a_chunk(pair):
    rows = torch.arange(STARTS[7] + 25, STARTS[8])
    pair.b[rows] = pair.b[(rows + 7).clamp(max=STARTS[8] - 1)]


def samples_change_places(pair):
    pair.b = torch.cat([pair.b[sample(i)] for i in (0, 1, 5, 3, 4, 2, 6, 7, 8, 9)])


def samples_in_order_of_arrival(pair):
    order = (4, 0, 2, 1, 3, 5, 9, 6, 7, 8)
    pair.b = torch.cat([pair.b[sample(i)] for i in order])
    pair.lengths = tuple(LENGTHS[i] for i in order)


def lose_a_sample(pair):
    pair.b = torch.cat([pair.b[: STARTS[5]], pair.b[STARTS[6] :]])
    pair.lengths = (*LENGTHS[:5], *LENGTHS[6:])


def copy_a_sample_twice(pair):
    pair.b[sample(1)] = pair.b[sample(5)] = pair.b[sample(8)]


def swap_layers(pair):
    pair.b[:, [2, 5]] = pair.b[:, [5, 2]]


def repeat_a_row(pair):
    pair.b[STARTS[7] + 30 : STARTS[8]] = pair.b[STARTS[7] + 30].clone()


def add_8_to_ids(pair):
    pair.b = (pair.b + 8) % pair.num_experts


def use_other_weights(pair):
    pair.b[:, 4] = logits_of(8, pair.num_experts, seed=7)[:, 4].topk(pair.b.shape[2], dim=1).indices


def reorder_experts(pair):
    pair.b = pair.b.flip(2)


def lose_routes(pair):
    pair.mask = torch.ones(len(pair.b), dtype=torch.bool)
    pair.mask[sample(9)] = False


ALL = tuple(LAYERS)
FAULTS = {
    # The fact's kind, layers, first and last row, and words.
    shift_a_layer_from_a_row_on: ("row", (5,), (502, 988), "match a's rows 500..986 (2 rows earlier), in layer 5:"),
    lose_a_chunk: ("row", ALL, (708, 808), "(sample 7, from position 25) of b match a's rows 715..815 (7 rows later)"),
    samples_change_places: ("sample_order", ALL, (166, 594), "samples 2 and 5 of b changed places, in all layers:"),
    samples_in_order_of_arrival: ("sample_order", ALL, (0, 988), "6..9 of b match samples 4, 0..1, 3, 9, 6..8 of a"),
    lose_a_sample: ("sample_order", ALL, (499, 892), "samples 5..8 of b match samples 6..9 of a, in all layers:"),
    copy_a_sample_twice: ("sample_order", ALL, (70, 594), "samples 1, 5 of b match samples 8, 8 of a, in all layers:"),
    swap_layers: ("layer", (4, 7), (0, 988), "layers 4, 7 of b match layers 7, 4 of a, in all 989 rows of b:"),
    repeat_a_row: ("constant", ALL, (713, 815), "(sample 7, from position 30) of b repeat one route, in all layers"),
    add_8_to_ids: ("names", ALL, (0, 988), "name each expert by its id plus 8"),
    use_other_weights: ("nothing", (6,), (0, 988), "are as unlike a's as unrelated rows, in layer 6"),
    reorder_experts: ("expert_order", ALL, None, "decisions that agree list their experts in a different order"),
    lose_routes: ("samples", (), None, "77 rows of sample 9 have a route in a and none in b."),
}  # fmt: skip


@pytest.mark.parametrize(("share", "topk", "num_experts"), LEVELS)
@pytest.mark.parametrize("plant", FAULTS)
def test_a_planted_fault_is_stated_with_its_rows_and_layers(plant, share, topk, num_experts):
    pair = noisy_pair(share, topk, num_experts)
    plant(pair)
    facts = pair.diff().facts
    kind, layers, rows, words = FAULTS[plant]
    fact = max(facts, key=lambda each: each.decisions)
    assert (fact.kind, fact.layer_numbers) == (kind, layers), [str(each) for each in facts]
    assert words in fact.text or abs(fact.rows[0] - rows[0]) + abs(fact.rows[1] - rows[1]) in (1, 2), fact.text
    assert len([each for each in facts if each.rows]) <= 1, [str(each) for each in facts]


@pytest.mark.parametrize("topk_of", [(4, 32), (8, 128), (1, 16), (2, 8)])
@pytest.mark.parametrize("shares", [0.02, 0.08, 0.3, [0.01 + 0.06 * i for i in range(8)], "whole sets"])
def test_plain_noise_has_no_fact(shares, topk_of):
    pair = noisy_pair(0.0 if shares == "whole sets" else shares, *topk_of)
    if shares == "whole sets":
        flip = torch.rand(pair.b.shape[:2], generator=torch.Generator().manual_seed(5)) < 0.08
        other = logits_of(8, topk_of[1], seed=5).topk(topk_of[0], dim=2).indices
        pair.b = torch.where(flip.unsqueeze(2), other, pair.b)
    for lengths in ({}, {"sequence_lengths": None}):
        diff = pair.diff(**lengths)
        assert not diff.same
        assert diff.facts == (), [str(fact) for fact in diff.facts]


def test_layers_under_other_numbers_match_those_of_a_also_where_a_has_no_such_number():
    pair = noisy_pair(0.02, 4, 32)
    one, other = (
        mrr.RoutingTrace(topk_indices=routes, layer_numbers=layers, num_experts=32)
        for routes, layers in ((pair.a, LAYERS), (pair.b, range(3, 11)))
    )
    (fact,) = mrr.diff_traces(one, other).facts
    assert "layers 3..10 of b match layers 2..9 of a, in all 989 rows of b: " in fact.text
    (fact,) = mrr.diff_traces(one, other.select_layers([10])).facts[1:]
    assert "layer 10 of b matches layer 9 of a, in all 989 rows of b: " in fact.text


def test_of_a_long_trace_the_rows_that_differ_most_are_searched(monkeypatch):
    monkeypatch.setattr("megatron_router_replay.diagnostics.window.MAX_ROWS", 400)
    pair = noisy_pair(0.02, 4, 32)
    pair.b[sample(1)] = pair.b[sample(8)]  # rows 70 to 165; rows 312 to 711 are searched
    pair.b[STARTS[4] + 1 : STARTS[5]] = pair.b[STARTS[4] : STARTS[5] - 1].clone()
    (fact,) = pair.diff().facts
    words = "rows 349..498 (sample 4, from position 1) of b match a's rows 348..497 (1 row earlier), in all layers: "
    assert fact.text.startswith(words)
    assert fact.text.endswith(" decisions that were read.")


def test_of_a_trace_that_is_read_in_blocks_the_rows_that_differ_most_are_searched(monkeypatch):
    monkeypatch.setattr("megatron_router_replay.diagnostics.window.MAX_ROWS", 400)
    monkeypatch.setattr("megatron_router_replay.diagnostics.counting._BLOCK_ROWS", 100)
    monkeypatch.setattr("megatron_router_replay.diagnostics.source.BLOCK_BYTES", 1)
    monkeypatch.setattr("megatron_router_replay.diagnostics.source._BLOCK_ROWS", 200)
    pair = noisy_pair(0.02, 4, 32)
    pair.b[817:912] = pair.b[816:911].clone()  # sample 8, in the fifth block that is read
    (fact,) = pair.diff().facts
    assert fact.text.startswith(
        "rows 817..911 (sample 8, from position 1) of b match a's rows 816..910 (1 row earlier)"
    )


def test_near_ties_of_top_2_hide_no_rows_that_differ_more(monkeypatch):
    monkeypatch.setattr("megatron_router_replay.diagnostics.window.MAX_ROWS", 400)
    monkeypatch.setattr("megatron_router_replay.diagnostics.counting._BLOCK_ROWS", 100)
    pair = noisy_pair(0.0, 2, 32)
    first, second = pair.a[100:200].unbind(2)
    third = (first + 1) % 32
    pair.b[100:200, :, 1] = torch.where(third == second, (first + 2) % 32, third)  # one expert of two, in 100 rows
    pair.b[817:877] = pair.b[816:876].clone()  # both, in most decisions of 60 rows
    (fact,) = pair.diff().facts
    assert fact.text.startswith(
        "rows 817..876 (sample 8, from position 1) of b match a's rows 816..875 (1 row earlier)"
    )


def test_samples_of_a_long_trace_that_changed_places_are_found_where_they_are(monkeypatch):
    monkeypatch.setattr("megatron_router_replay.diagnostics.window.MAX_ROWS", 950)
    pair = noisy_pair(0.02, 4, 32)
    pair.b[sample(5)], pair.b[sample(8)] = pair.b[sample(8)].clone(), pair.b[sample(5)].clone()
    (fact,) = pair.diff().facts  # rows 37 to 986 are searched
    assert fact.text.startswith("samples 5 and 8 of b changed places, in all layers: ")


@pytest.mark.parametrize(("rows", "stated"), [(8, []), (48, [(100, 147)])])
def test_a_few_rows_are_no_fact(rows, stated):
    pair = noisy_pair(0.0, 4, 32)
    pair.b[100 : 100 + rows] = pair.a[101 : 101 + rows]
    assert [fact.rows for fact in pair.diff().facts] == stated


@pytest.mark.parametrize(
    ("first", "last", "offset", "words"),
    [
        # The source, sample 3 moved 48 rows to the front, would lie in sample 2 for the most part.
        (257, 284, 48, "rows 257..284 (sample 2, from position 91) of b match a's rows 305..332 (48 rows later)"),
        # They fill two thirds of sample 3, and a third of sample 2.
        (242, 281, 48, "rows 242..281 (sample 2, from position 76) of b match a's rows 290..329 (48 rows later)"),
        # They fill three quarters of no piece.
        (242, 279, 48, "rows 242..279 (sample 2, from position 76) of b match a's rows 290..327 (48 rows later)"),
        # They are half of sample 1.
        (70, 121, 220, "rows 70..121 (sample 1) of b match a's rows 290..341 (220 rows later)"),
    ],
)
def test_rows_of_a_different_sample_are_no_sample_that_moved(first, last, offset, words):
    pair = noisy_pair(0.02, 4, 32)
    pair.b[first : last + 1] = pair.b[first + offset : last + 1 + offset].clone()
    (fact,) = pair.diff().facts
    assert fact.text.startswith(f"{words}, in all layers: ")


def test_rows_after_the_last_sample_are_of_no_sample():
    """b has no lengths, so those of a stand for them, and a's first sample once more at its end is no sample 2."""
    routes = torch.rand(80, 3, 32, generator=torch.Generator().manual_seed(1)).topk(4).indices
    numbers = {"layer_numbers": (1, 2, 3), "num_experts": 32}
    a = mrr.RoutingTrace(topk_indices=routes, sequence_lengths=(40, 40), **numbers)
    b = mrr.RoutingTrace(topk_indices=torch.cat([routes, routes[:40]]), **numbers)
    assert [str(fact) for fact in mrr.diff_traces(a, b).facts] == [
        "rows 80..119 of b match a's rows 0..39 (80 rows earlier), in all layers: 120 of 120 decisions."
    ]
    longer = torch.cat([routes, torch.rand(40, 3, 32, generator=torch.Generator().manual_seed(2)).topk(4).indices])
    b = mrr.RoutingTrace(topk_indices=longer[[*range(40), *range(80, 120)]], sequence_lengths=(40, 40), **numbers)
    facts = mrr.diff_traces(mrr.RoutingTrace(topk_indices=longer, **numbers), b).facts
    assert (
        "rows 40..79 (sample 1) of b match a's rows 80..119 (40 rows later), in all layers: 120 of 120 decisions."
        in [str(fact) for fact in facts]
    )


def test_two_experts_in_a_different_order_are_a_fact():
    pair = noisy_pair(0.02, 2, 8)
    reorder_experts(pair)
    assert [(fact.kind, fact.layer_numbers) for fact in pair.diff().facts] == [("expert_order", ALL)]


def test_decisions_that_share_half_of_their_experts_are_not_near():
    pair, rows = noisy_pair(0.0, 2, 8), torch.arange(989)
    pair.a[:, 4] = torch.stack([rows % 4, (rows + 1) % 4], dim=1)
    pair.b[:, 4] = torch.stack([rows % 4, 4 + rows % 3], dim=1)
    fact = pair.diff().facts[0]
    assert (fact.kind, fact.layer_numbers, fact.decisions) == ("nothing", (6,), 989)
