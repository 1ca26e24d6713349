"""Findings of a rank and of all ranks, at their limits: rows packed by hand, no router around them."""

import importlib
import inspect
import pkgutil
import re

import numpy as np
import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.mcore import judge
from megatron_router_replay.mcore.batches import equal_samples
from megatron_router_replay.mcore.judge.blocks import EVIDENCE
from megatron_router_replay.mcore.judge.rank_evidence import (
    Anomaly,
    ComparedLayer,
    RankAgreement,
    RankEvidence,
    SharedBlock,
)
from megatron_router_replay.mcore.judge.sums import Sums
from megatron_router_replay.mcore.judge.verdict import group_verdict

EXPERTS, TOPK = 64, 4
OUTSIDE, LIVE = 0, 2


def compared(wrong=(), *, num=200, layer=1, number=0, sequences=1, rows=None, experts=None, first=None):
    """A compared layer, its rows counted sequence after sequence: each wrong row is evidence of 6, a right one of -6.

    Args:
        rows: of the trace.
        experts: [num, topk], replayed.
        first: [num], the expert that the live router ranks first; -1: the row is not replayed.
    """
    is_wrong = np.isin(np.arange(num), list(wrong))
    experts = np.tile(np.arange(TOPK), (num, 1)) if experts is None else experts
    first = np.arange(num) // EXPERTS if first is None else first
    second = np.where(first >= 0, np.arange(num) % EXPERTS, -1)  # each row is of a kind of its own
    levels = np.where(is_wrong, OUTSIDE, LIVE)[:, None]
    packed = np.concatenate([3 * experts + levels, first[:, None], second[:, None]], 1).astype(np.int16)

    def s_major(values):
        return values.reshape(sequences, num // sequences, -1).transpose(1, 0, 2).reshape(num, -1)

    rows = None if rows is None else torch.from_numpy(s_major(np.asarray(rows)).ravel())
    loads = np.full((2, EXPERTS), num * 0.05)
    shape = num // sequences, sequences
    return ComparedLayer((0, number), layer, shape, rows, torch.empty(0), torch.empty(0)), s_major(packed), loads


def rank_evidence(*parts, trace=None):
    return RankEvidence(parts, topk=TOPK, num_experts=EXPERTS, rank=3, trace=trace)


def texts(*parts, trace=None):
    """Return what is said of blocks, by evidence."""
    anomalies = sorted(rank_evidence(*parts, trace=trace).anomalies, reverse=True)
    return [anomaly.text for anomaly in anomalies if "routes of other tokens" in anomaly.text]


def test_the_table_of_limits_has_every_limit_of_the_family_with_its_value():
    table = dict(re.findall(r"^    (\w+) +([\d.]+) ", judge.__doc__, re.MULTILINE))
    limits = {"min_agreement": inspect.signature(mrr.replay).parameters["min_agreement"].default}
    family = [importlib.import_module(f"{judge.__name__}.{each.name}") for each in pkgutil.iter_modules(judge.__path__)]
    for module in (*family, equal_samples):
        named = {name: value for name, value in vars(module).items() if isinstance(value, int | float)}
        limits |= {name: value for name, value in named.items() if name.isupper() and name != "ALL"}
    assert len(table) == 34
    assert {name: float(value) for name, value in table.items()} == limits


def trace_of(num):
    routes = torch.rand(num, 1, EXPERTS, generator=torch.Generator().manual_seed(0)).topk(TOPK).indices
    return mrr.RoutingTrace(topk_indices=routes, layer_numbers=[1], num_experts=EXPERTS)


def summary(**values):
    return RankAgreement(trace="a trace", **values)


# ---- a rank
@pytest.mark.parametrize(("num_wrong", "raises"), [(11, False), (12, True)])
def test_twelve_kinds_of_rows_are_the_least_that_raise(num_wrong, raises):
    found = rank_evidence(compared(range(num_wrong), rows=range(200)), trace=trace_of(200))
    assert [anomaly.evidence for anomaly in found.anomalies] == [6.0 * num_wrong]
    assert found.wrong_rows == ([[0, 12]] if raises else [])
    assert bool(group_verdict([summary(anomalies=found.anomalies)], 0.25).problems) == raises


@pytest.mark.parametrize(
    ("most", "agreement", "says"),
    [
        (63, -0.2, ""),
        (64, -0.2, "warns of layers 3: -20%"),
        (64, 0.24, "warns of layers 3: 24%"),
        (64, 0.26, ""),
        (127, 0.4, ""),
        (128, 0.4, "warns of layers 3: 40%"),
        (128, -0.2, "raises"),
    ],
)
def test_a_layer_with_few_decisions_warns_where_one_with_more_raises(most, agreement, says):
    sums = Sums(100, agreement * most, most, agreement * most, most)
    found = group_verdict([summary(layers={3: sums, 2: Sums(100, 60, 60, 60, 60)})], 0.25)
    assert found.warnings == [
        "the live router agrees little with the replayed routes: layers " + says.removeprefix("warns of layers ")
    ] * says.startswith("warns")
    assert len(found.problems) == (says == "raises")


def test_many_rows_of_a_kind_are_little_evidence():
    """A thousand rows of one kind that disagree are those of a near-tie."""
    assert Sums(1000, -100, 1000, -20, 127).layer_agreement is None
    assert Sums(1000, 100, 1000, 60, 200).layer_agreement == 0.3
    assert Sums(1000, 400, 1000, 60, 200).layer_agreement == 0.4


@pytest.mark.parametrize(("num_wrong", "raises"), [(19, False), (20, True)])
def test_twenty_single_rows_are_the_least_that_raise(num_wrong, raises):
    wrong = range(7, 4000, 200)[:num_wrong]  # 0.5 % of all rows
    found = rank_evidence(compared(wrong, num=4000, rows=range(4000)), trace=trace_of(4000))
    single = [anomaly for anomaly in found.anomalies if "single rows" in anomaly.text]
    assert [anomaly.evidence for anomaly in single] == [EVIDENCE] * raises * 2, "of the layer, and of all layers"
    assert found.wrong_rows == [[row, row + 1] for row in wrong] * raises
    assert found.rows_apart == num_wrong


def test_single_rows_of_several_layers_add_up():
    two = [compared(range(7 + 40 * layer, 2000, 200), num=2000, layer=layer) for layer in (1, 2)]
    (single,) = (anomaly for anomaly in rank_evidence(*two).anomalies if "single rows" in anomaly.text)
    assert single.text.startswith("rank 3, 2 layers: 20 single rows")
    assert single.evidence == EVIDENCE, "20 of 20 that noise may give"


@pytest.mark.parametrize("num", [1, 2])
def test_the_only_rows_of_a_layer_agree_as_by_chance(num):
    part, packed, loads = compared(num=4, first=np.where(np.arange(4) < num, 0, -1))
    loads[:] = num * (np.arange(EXPERTS) < TOPK)
    assert rank_evidence((part, packed, loads)).sums[1] == Sums(float(num), 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("num", [16, 17])
def test_wrong_experts_are_listed_up_to_sixteen(num):
    experts = np.tile(np.arange(TOPK), (2000, 1))
    wrong = range(0, 2000, 20)
    experts[wrong] = 20 + np.arange(4 * len(wrong)).reshape(-1, TOPK) % num
    (text,) = (
        each.text for each in rank_evidence(compared(wrong, num=2000, experts=experts)).anomalies if "ids" in each.text
    )
    listed = ", ".join(map(str, range(20, 36))) + ", ..." * (num > 16)
    assert text.startswith(f"rank 3, layer 1: experts {listed} are hardly ever near the live router's choice")


def test_the_number_of_blocks_is_said_of_several():
    (one,) = texts(compared(range(20, 40)))
    assert one == "rank 3, chunk 0, micro-batch 0, sequence 0, positions 20 to 39, layer 1: routes of other tokens"
    (two,) = texts(compared([*range(20, 40), *range(100, 150)]))
    assert two.startswith("rank 3, chunk 0, micro-batch 0, sequence 0, positions 100 to 149, ")
    assert two.endswith(" (2 such blocks)")


def test_rows_have_no_name_in_a_trace_if_they_are_unknown():
    assert "sequence 0, positions 20 to 39, layer 1" in texts(compared(range(20, 40)), trace=trace_of(200))[0]


ALONE = "; the other layers of these tokens are right"


def test_the_other_layers_are_right_only_if_all_of_them_in_these_rows_are():
    wrong, rows, others = range(20, 40), range(200), range(200, 400)
    elsewhere = compared(layer=3, number=1, rows=others)
    by_layer = compared(wrong, rows=rows), compared(layer=2, rows=rows), elsewhere
    assert ALONE in texts(*by_layer, trace=trace_of(400))[0]
    both = texts(compared(wrong, rows=rows), compared(wrong, layer=2, rows=rows), trace=trace_of(400))
    assert len(both) == 3, "two layers, and both together"
    assert not [text for text in both if ALONE in text]
    (alone,) = texts(compared(wrong, rows=rows), elsewhere, trace=trace_of(400))
    assert ALONE not in alone, "no other layer was compared in these rows"


def test_a_stream_that_moved_is_searched_for_in_its_sequence_of_the_first_layer():
    """The first layer was compared alone in a micro-batch too, and the block begins with its sequence."""
    first = np.random.default_rng(0).integers(0, 60, 200)
    experts = np.stack([first, *(np.full(200, expert) for expert in (61, 62, 63))], 1)
    late = experts.copy()
    late[100:160, 0] = first[93:153]
    of_rows = {"experts": experts, "first": first, "sequences": 2}
    of_late = {"experts": late, "first": first, "sequences": 2}
    parts = [compared(layer=layer, **of_rows) for layer in (1, 2)]
    parts += [compared(layer=1, number=1, **of_rows)]
    parts += [compared(range(100, 160), layer=layer, number=2, **of_late) for layer in (1, 2)]
    place = "rank 3, chunk 0, micro-batch 2, sequence 1, positions 0 to 59, "
    assert f"{place}layers 1, 2: routes of other tokens; they fit the tokens 7 places before them" in texts(*parts)


@pytest.mark.parametrize(("num_live", "is_said"), [(0, True), (15, False)])
def test_a_block_fits_no_tokens_that_were_not_replayed(num_live, is_said):
    """Twelve rows, the least that raise, have a cause; thirty do not fit tokens of which half have no route."""
    first = np.random.default_rng(0).integers(0, 60, 200)
    moved = np.roll(first, 40)
    first[30 : 30 + 2 * num_live : 2] = -1
    moved[70 : 70 + 2 * num_live : 2] = 1
    experts = np.stack([moved, *(np.full(200, expert) for expert in (61, 62, 63))], 1)
    (text,) = texts(compared(range(70, 100 if num_live else 82), experts=experts, first=first))
    assert ("they fit the tokens 40 places before them" in text) == is_said
    assert ("they fit" in text) == is_said


def test_parts_of_sequences_are_the_clearest_first_with_their_rows():
    wrong = [*range(20, 24), *range(130, 142)]
    rows = [*range(0, 200, 2), *range(200, 300)]
    small, large = 4 * 6.0, 12 * 6.0
    parts = rank_evidence(compared(wrong, sequences=2, rows=rows), trace=trace_of(300)).shared_blocks(5)
    assert [(part.name, part.evidence, part.rows) for part in parts] == [
        ("5 0.0.1 [1]", large, [[230, 242]]),
        ("5 0.0.0 [1]", small, [[40, 41], [42, 43], [44, 45], [46, 47]]),
    ]
    assert [sum(part.by_kind.values()) for part in parts] == [large, small]


# ---- all ranks
def test_a_layer_is_judged_from_128_decisions_on_and_raises_or_warns_below_a_limit():
    assert Sums(100, 31.75, 127, 31.75, 127).layer_agreement is None
    at_limits = {1: Sums(100, 32, 128, 32, 128), 2: Sums(100, 64, 128, 64, 128)}
    assert group_verdict([summary(layers=at_limits)], 0.25)[:2] == (
        [],
        ["the live router agrees little with the replayed routes: layers 1: 25%"],
    )
    assert (
        "less than min_agreement=0.26 in 1 of 2 layers (1: 25%"
        in group_verdict([summary(layers=at_limits)], 0.26).problems[0]
    )


@pytest.mark.parametrize("agreement", [0.1, 0.4])
def test_several_replicas_say_the_same_once(agreement):
    layers = {1: Sums(100, 100 * agreement, 200, 200 * agreement, 200)}
    told = group_verdict([summary(replica=replica, layers=layers) for replica in range(3)], 0.25)
    assert (len(told.problems), len(told.warnings)) == ((1, 0) if agreement < 0.25 else (0, 1))


@pytest.mark.parametrize(
    ("num_ranks", "value", "raises"), [(2, 3.5, False), (2, 3.625, True), (3, 2.75, False), (3, 3.0, True)]
)
def test_parts_raise_from_the_evidence_of_a_block_on(num_ranks, value, raises):
    """Twelve kinds of rows on each rank, less 15, which noise rises on each rank but one."""
    parts = [
        SharedBlock(
            "0 0.0.0 [1]", 12 * value, {f"{rank} {kind}": value for kind in range(12)}, "these rows", [[rank, 9]]
        )
        for rank in range(num_ranks)
    ]
    told = group_verdict([summary(shared_blocks=[part]) for part in parts], 0.25)
    assert bool(told.problems) == raises
    assert told.wrong_rows == ({"a trace": [[rank, 9] for rank in range(num_ranks)]} if raises else {})


def test_an_anomaly_raises_from_its_evidence_on():
    assert group_verdict([summary(anomalies=[Anomaly(71.9, "rows")])], 0.25).problems == []
    (problem,) = group_verdict([summary(anomalies=[Anomaly(72.0, "rows")])], 0.25).problems
    assert problem.startswith("rows. The log-likelihood ratio is 72, 72 raises")
