"""Agreement of the live router with replayed routes: sums by hand, wrong and legal routes, ranks that add up."""

import json
import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import group_limited_topk

import megatron_router_replay as mrr
from megatron_router_replay import checks
from megatron_router_replay.mcore.core.call import TopKRequest
from megatron_router_replay.mcore.judge import verdict
from megatron_router_replay.mcore.judge.agreement import Agreement, LiveAgreement
from megatron_router_replay.mcore.judge.blocks import EVIDENCE, ComparedRows
from megatron_router_replay.mcore.judge.rank_evidence import Anomaly, RankAgreement, SharedBlock
from megatron_router_replay.mcore.judge.sums import Sums, add_up
from tests.unit.mcore.tiny_chunk import ROWS, Chunk, forward, random_trace, tokens

LAYERS = 4


def comparing(*, experts=32, topk=4, rank=0, sharing=(0, 1, 0), trace=None):
    made = Agreement(topk=topk, num_experts=experts, num_layers=LAYERS, every_layer=False, rank=rank, trace=trace)
    made.chunk = SimpleNamespace(
        index=0, module=torch.nn.Identity(), replayed_routers=range(LAYERS), row_sharing=sharing
    )
    made.next_layer(made.chunk, has_replayed_rows=True)
    return made


def add(compared, scores, replayed, *, number=0, layer=1, sequences=1, counts=None, rows=None):
    microbatch = SimpleNamespace(number=number, shape=(len(scores) // sequences, sequences), rows=rows)
    request = TopKRequest(scores, compared.topk, None, None, torch.topk)
    compared.add(microbatch, compared.chunk, layer, request=request, replayed=replayed, counts=counts)


def routes(rows, seed=0, *, experts=32, topk=4, noise=0.1):
    """Scores of a live router, and the top-k of scores that differ a little."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, experts, generator=generator)
    other = scores + noise * torch.randn(rows, experts, generator=generator)
    return scores, other.topk(topk, dim=1).indices


def found(*ranks, least=0.25):
    """Return the problem that the ranks of a session raise, or "", and whether they warn."""
    told = [RankAgreement.of_json(json.loads(json.dumps(each.summary()))) for each in ranks]  # as ranks publish them
    result = verdict.group_verdict(told, least)
    return "".join(result.problems), bool(result.warnings)


# ---- sums
def test_an_expert_with_the_score_of_the_last_live_one_is_live_as_well():
    """Rows of [3, 2, 2, 1, 0, ...]: the live top-2 is expert 0 and 1 or 2, and near are the best four."""
    scores = torch.tensor([[3.0, 2, 2, 1, 0, 0, 0, -1, -1, -1]] * 90)
    compared = comparing(experts=10, topk=2)
    for layer, second in enumerate((1, 2, 3, 9)):
        add(compared, scores, torch.tensor([[0, second]] * 90), layer=layer)
    packed = [layer.packed[0, :2].tolist() for layer in compared._compared]
    assert packed == [[2, 3 * 1 + 2], [2, 3 * 2 + 2], [2, 3 * 3 + 1], [2, 3 * 9 + 0]]
    assert compared._compared[0].loads.tolist() == [[90, 90, 90] + [0] * 7, [90, 90, 90, 90] + [0] * 6]


def test_in_groups_the_experts_of_the_best_groups_are_live_however_low_they_rank():
    """Experts 0 to 3 in groups of two, of which the best one counts by its two scores: 2 and 3 have 5 + 0, 0 and 1 have 4."""
    scores = torch.tensor([[2.0, 2.0, 5.0, 0.0]] * 90)
    compared = comparing(experts=4, topk=2)
    of_groups = lambda scores, topk, **groups: group_limited_topk(scores, topk, 90, 4, **groups)  # noqa: E731
    request = TopKRequest(scores, 2, 2, 1, of_groups)
    microbatch = SimpleNamespace(number=0, shape=(90, 1), rows=None)
    replayed = torch.tensor([[2, 3], [0, 3], [0, 2]] * 30)
    compared.add(microbatch, compared.chunk, 0, request=request, replayed=replayed, counts=None)
    # Near are the best three of all, 2 with 0 and 1, and the live ones.
    assert compared._compared[0].packed[:3, :2].tolist() == [
        [3 * 2 + 2, 3 * 3 + 2],
        [3 * 0 + 1, 3 * 3 + 2],
        [1, 3 * 2 + 2],
    ]
    assert compared._compared[0].loads.tolist() == [[0, 0, 90, 90], [90, 90, 90, 90]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_shared_experts_are_counted_as_by_hand_whatever_the_default_dtype(dtype):
    scores, replayed = routes(120, 1, experts=4, topk=2)
    counts = torch.arange(120) % 3 != 0
    compared = comparing(experts=4, topk=2)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        add(compared, scores, replayed, counts=counts)
        add(compared, scores, replayed.flip(1), counts=counts, layer=2)
        report = compared.report()
    finally:
        torch.set_default_dtype(before)
    live = scores.topk(2, dim=1).indices
    load = torch.bincount(live[counts].flatten(), minlength=4) / 80
    shared = most = 0.0
    for one, other in zip(live[counts].tolist(), replayed[counts].tolist()):
        chance = float(load[other].sum())
        shared, most = shared + len({*one} & {*other}) - chance, most + 2 - chance
    assert report.layers[1][:3] == pytest.approx((80, shared, most), rel=1e-5)
    assert report.layers[1] == pytest.approx(report.layers[2], rel=1e-6)
    add(compared, scores, replayed, counts=torch.zeros(120, dtype=torch.bool), number=1)
    assert compared.report().layers[1] == report.layers[1], "rows without a route count nowhere"


def test_rows_after_a_report_inside_the_session_are_compared_too():
    compared = comparing()
    scores, replayed = routes(400)
    add(compared, scores, replayed)
    assert compared.report().layers[1].rows == 400
    assert found(compared) == ("", False)
    add(compared, scores, routes(400, 1)[1], number=1)
    assert compared.report().layers[1].rows == 800
    assert "micro-batch 1, sequence 0" in found(compared)[0]


@pytest.mark.parametrize(("experts", "topk"), [(4, 2), (8, 4), (16, 8), (128, 8)])
def test_random_routes_agree_by_0(experts, topk):
    compared = comparing(experts=experts, topk=topk)
    for number in range(4):
        scores, _ = routes(1000, number, experts=experts)
        add(compared, scores, routes(1000, 100 + number, experts=experts, topk=topk)[1], number=number)
    assert compared.report().all_layers == pytest.approx(0, abs=0.03)
    assert "in 1 of 1 layers" in found(compared)[0]


def test_a_router_that_uses_all_experts_is_not_compared():
    compared = comparing(experts=4, topk=4)
    assert compared.next_layer(compared.chunk, has_replayed_rows=True) is None
    assert compared.report().to_dict() == {}


def test_a_micro_batch_without_rows_adds_nothing():
    compared, none = comparing(sharing=(0, 2, 0)), comparing(sharing=(0, 2, 0))
    scores, replayed = routes(200)
    add(compared, scores, replayed)
    before = compared.report()
    for each in (compared, none):
        add(each, scores[:0], replayed[:0], number=1)
    assert compared.report() == before
    assert none.report().to_dict() == {}


# ---- wrong routes
def other_rows(scores, replayed):
    return replayed.roll(1, 0)


WRONG = {
    # damage -> how, in which layers, in which micro-batches, the message
    "right": (lambda scores, replayed: replayed, {}, {}, ""),
    "every layer one late": (other_rows, {1, 2, 3, 4}, {0, 1, 2}, "in 4 of 4 layers"),
    "a constant layer": (
        lambda scores, replayed: torch.arange(replayed.shape[1]).expand_as(replayed),
        {3},
        {0, 1, 2},
        "in 1 of 4 layers",
    ),
    "a layer with other ids": (lambda scores, replayed: (replayed + 3) % 8, {2}, {0, 1, 2}, "in 1 of 4 layers"),
    "a micro-batch one late": (other_rows, {1, 2, 3, 4}, {1}, r"micro-batch 1, .*: routes of other tokens"),
    "a lone sample": (
        lambda scores, replayed: torch.cat([replayed[0::2].roll(1, 0), replayed[1::2]], 1).view_as(replayed),
        {1},
        {1},
        r"rank 0, chunk 0, micro-batch 1, sequence 0, positions \d to 19\d, layer 1: routes of other tokens",
    ),
}


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_routes_raise_and_name_their_place(case, topk):
    damage, layers, numbers, message = WRONG[case]
    compared = comparing(experts=8, topk=topk)
    for number in range(3):
        for layer in range(1, LAYERS + 1):
            scores, replayed = routes(400, 10 * number + layer, experts=8, topk=topk)
            if layer in layers and number in numbers:
                replayed = damage(scores, replayed)
            add(compared, scores, replayed, number=number, layer=layer, sequences=2)
    problem, warned = found(compared)
    assert bool(problem) == bool(message)
    assert re.search(message, problem), problem
    assert found(compared, least=0) == ("", False), "min_agreement=0 is off"
    assert not warned


def test_wrong_rows_are_named_by_sample_and_token():
    scores, replayed = routes(1000)
    trace = mrr.RoutingTrace(
        topk_indices=replayed.unsqueeze(1),
        layer_numbers=[1],
        num_experts=32,
        sequence_lengths=[100, 900],
        sample_ids=["req-1", "req-17"],
    )
    compared = comparing(trace=trace)
    replayed[300:360] = other_rows(scores, replayed)[300:360]
    add(compared, scores, replayed, rows=torch.arange(1000))
    assert "sample 1 ('req-17'), tokens 200 to 259, layer 1: routes of other tokens" in found(compared)[0]


# ---- legal routes
@pytest.mark.parametrize("topk", [1, 4])
def test_a_run_of_one_token_at_a_near_tie_is_no_evidence(topk):
    compared = comparing(topk=topk)
    for number in range(3):
        scores, replayed = routes(2000, number, topk=topk)
        scores[:1000], replayed[:1000] = scores[0], torch.arange(31, 31 - topk, -1)
        scores[:1000, 32 - topk :] = -10
        add(compared, scores, replayed, number=number)
    assert found(compared) == ("", False)


@pytest.mark.parametrize("hot_share", [0.5, 0.98])
def test_a_top_1_router_with_a_hot_expert_is_legal(hot_share):
    """An early rule refused up to 42 % of such routes, because most rows name one expert."""
    for seed in range(10):
        compared, generator = comparing(experts=8, topk=1), torch.Generator().manual_seed(seed)
        for number in range(10):
            scores = torch.randn(400, 8, generator=generator)
            margin = scores[:, 1:].max(1).values - scores[:, 0]
            scores[:, 0] += margin.quantile(hot_share)
            replayed = (scores + 0.1 * torch.randn(scores.shape, generator=generator)).topk(1).indices
            add(compared, scores, replayed, number=number, layer=number % 4 + 1, sequences=2)
        assert found(compared) == ("", False)


@pytest.mark.parametrize("has_versions", [True, False])
def test_noise_is_that_of_each_version_of_the_weights(has_versions):
    """Half of a rollout is of older weights: with versions, their noise is no evidence of wrong rows."""
    scores, new = routes(4096, noise=0.02)
    _, old = routes(4096, noise=1.2)
    is_old = torch.arange(4096) // 512 % 2 == 1
    replayed = torch.where(is_old[:, None], old, new)
    trace = mrr.RoutingTrace(
        topk_indices=replayed.unsqueeze(1),
        layer_numbers=[1],
        num_experts=32,
        weight_version=is_old.int() if has_versions else None,
    )
    compared = comparing(trace=trace)
    add(compared, scores, replayed, rows=torch.arange(4096))
    evidence = compared.report().block.evidence
    assert (evidence < EVIDENCE / 4) == has_versions == (found(compared)[0] == ""), evidence


def test_the_first_row_of_a_trace_may_be_wrong():
    scores, replayed = routes(1000)
    trace = mrr.RoutingTrace(topk_indices=replayed.unsqueeze(1), layer_numbers=[1], num_experts=32)
    compared = comparing(trace=trace)
    replayed[:60] = other_rows(scores, replayed)[:60]
    add(compared, scores, replayed, rows=torch.arange(1000))
    assert compared.summary().wrong_rows[0][0] == 0


def test_a_row_is_no_more_evidence_in_all_layers_together_than_in_one_layer_at_most():
    """Else wrong rows outweigh the right rows between them: one block, with less evidence than each of these two has."""
    experts = torch.zeros(2000, LAYERS, 1, dtype=torch.int64)  # not read: the rows are named by the trace
    trace = mrr.RoutingTrace(topk_indices=experts, layer_numbers=range(1, LAYERS + 1), num_experts=32)
    compared, wrong = comparing(topk=1, trace=trace), [*range(500, 513), *range(528, 541)]
    for layer in range(1, LAYERS + 1):
        scores, replayed = routes(2000, layer, topk=1, noise=0)
        replayed[wrong] = scores[wrong].argmin(dim=1, keepdim=True)
        add(compared, scores, replayed, layer=layer, rows=torch.arange(2000))
    summary = compared.summary()
    assert max(summary.anomalies)[0] == pytest.approx(13 * 6), "of a row in four layers; in one it has less than 4"
    assert summary.wrong_rows == [[500, 513], [528, 541]]


# ---- ranks
def one_wrong_sample(seed, num_ranks):
    """Ranks of a session of 24 samples of 95 rows and one of padding; one sample of a micro-batch is of other tokens."""
    ranks = [comparing(topk=8, rank=rank, sharing=(0, num_ranks, 0)) for rank in range(num_ranks)]
    counts = (torch.arange(96) < 95).unsqueeze(1).expand(96, 8)
    for number in range(3):
        scores, replayed = (x.view(96, 8, -1).clone() for x in routes(96 * 8, 10 * seed + number, topk=8))
        if number == 1:
            replayed[:, 5] = replayed[:, 5].roll(7, 0)
        for each, *parts in zip(ranks, *(x.chunk(num_ranks) for x in (scores, replayed, counts))):
            of_scores, of_replayed, counted = (part.flatten(0, 1) for part in parts)
            add(each, of_scores, of_replayed, counts=counted, number=number, layer=number + 1, sequences=8)
    return ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_one_wrong_sample_of_95_rows_raises_however_many_ranks_share_it(num_ranks):
    for seed in range(5):
        problem, _ = found(*one_wrong_sample(seed, num_ranks))
        assert re.search(r"micro-batch 1, sequence 5, .*layer 2: routes of other tokens", problem), problem


def test_a_sample_whose_parts_are_too_small_on_each_rank_raises_by_all_of_them():
    ranks = one_wrong_sample(0, 16)
    alone = [max(each.summary().anomalies)[0] for each in ranks]
    assert max(alone) < EVIDENCE
    assert "micro-batch 1, sequence 5" in found(*ranks)[0]
    parts = [part for each in ranks for part in each.summary().shared_blocks]
    assert {part.name for part in parts} == {"0 0.1.5 [2]"}, "right samples have no part to add"


@pytest.mark.parametrize(("num_wrong", "raises"), [(7, False), (8, True)])
def test_eight_wrong_rows_on_each_of_two_ranks_raise(num_wrong, raises):
    """A row is evidence of 6, and noise takes off 15 once: 2 * 8 * 6 - 15 is 81, 2 * 7 * 6 - 15 is 69."""
    ranks = [comparing(topk=8, rank=rank, sharing=(0, 2, 0)) for rank in range(2)]
    for rank, each in enumerate(ranks):
        scores, replayed = routes(400, rank, topk=8, noise=0.01)
        replayed[100 : 100 + num_wrong] = scores[100 : 100 + num_wrong].topk(8, largest=False).indices
        add(each, scores, replayed)
        assert max(each.summary().anomalies)[0] == 6 * num_wrong
    assert bool(found(*ranks)[0]) == raises


@pytest.mark.parametrize(("each", "raises"), [(43.4, False), (43.6, True)])
def test_what_noise_rises_on_one_rank_is_taken_off_once_for_two(each, raises):
    names = (f"{number}" for number in range(100))
    parts = [
        SharedBlock("0 0.0.0 [1]", each, {next(names): each / 10 for _ in range(10)}, "these rows", [])
        for _ in range(2)
    ]
    told = [RankAgreement(shared_blocks=[part]) for part in parts]
    assert bool(verdict.group_verdict(told, 0.25).problems) == raises  # 2 * 43.5 - 15 is 72


def test_noise_explains_at_most_half_of_the_experts_that_are_outside_by_chance():
    chance = np.full((1, 8), 0.25)
    outside = np.full((2, 64), 3 * 1 + 0, np.int16)  # expert 1, outside
    rows = ComparedRows(
        codes=outside, kinds=np.arange(64), ends=np.array([64]), live_chance=chance / 2, chance=chance, versions=None
    )
    assert rows.noise()[0].tolist() == [0.375]  # all are outside; 0.75 would be by chance


@pytest.mark.parametrize("wrong", [False, True])
def test_few_rows_on_each_of_many_ranks_add_up_for_a_layer(wrong):
    ranks = [comparing(experts=8, topk=2, rank=rank, sharing=(0, 1, rank)) for rank in range(64)]
    for rank, each in enumerate(ranks):
        scores, replayed = routes(12, rank, experts=8, topk=2)
        add(each, scores, other_rows(scores, replayed) if wrong else replayed)
    problem, _ = found(*ranks)
    assert ("in 1 of 1 layers" in problem) == wrong


@pytest.mark.parametrize(("wrong", "step", "result"), [((0, 1, 2, 3), 2, "warns"), ((2,), 1, "raises")])
def test_ranks_with_the_same_rows_count_once_and_one_that_is_wrong_alone_raises(wrong, step, result):
    ranks = [comparing(rank=rank, sharing=(rank, 1, 0)) for rank in range(4)]
    for rank, each in enumerate(ranks):
        for layer in range(1, LAYERS + 1):
            scores, replayed = routes(200, layer)
            if rank in wrong and layer == 1:
                replayed[::step] = other_rows(scores, replayed)[::step]
            add(each, scores, replayed, layer=layer, sequences=2)
    problem, warned = found(*ranks)
    assert (bool(problem), warned) == {"warns": (True, False), "raises": (True, False)}[result]
    layers = add_up((number, sums) for each in ranks[:1] for number, sums in each.report().layers.items())
    assert layers[2].rows == 200


# ---- in a session
def test_every_session_asks_one_layer_a_micro_batch_and_all_in_the_first_of_a_chunk():
    trace = random_trace(24, replay_mask=torch.arange(24) % 8 != 5)  # a live row is not compared

    def rows_by_layer(chunk, num_microbatches, **options):
        with mrr.replay(chunk, trace, **options) as session:
            for number in range(num_microbatches):
                session.microbatch(ROWS + 8 * number)
                chunk(tokens(), number)
        agreement = session.report.agreement
        return agreement and {layer: unit.rows for layer, unit in agreement.layers.items()}

    chunk, other = Chunk(), Chunk()
    assert rows_by_layer(chunk, 3) == {1: 14, 2: 14, 3: 7}
    assert rows_by_layer(other, 1) == {1: 7, 2: 7, 3: 7}
    assert rows_by_layer(chunk, 2) == {3: 7, 1: 7}, "the next session goes on with the next layer"
    assert rows_by_layer(chunk, 1, ask_every_layer=True) == {1: 7, 2: 7, 3: 7}
    assert rows_by_layer(chunk, 1, min_agreement=0) is None


def test_padding_alone_does_not_use_up_the_micro_batch_that_compares_all_layers():
    """A data-parallel rank may begin with a dummy; in the next session, one layer of a micro-batch is compared."""
    chunk = Chunk()
    dummy = torch.full_like(ROWS, -1)
    for all_rows, expected in (([dummy, ROWS], {1: 8, 2: 8, 3: 8}), ([ROWS], {2: 8})):
        with mrr.replay(chunk, random_trace(8)) as session:
            for rows in all_rows:
                session.microbatch(rows, padding=rows < 0)
                chunk(tokens())
        assert {layer: unit.rows for layer, unit in session.report.agreement.layers.items()} == expected


def recorded(chunk, number):
    with mrr.record(chunk) as recording:
        for i in range(number):
            recording.microbatch(torch.arange(48).view(2, 24) + 48 * i)
            chunk(tokens(2, 24, seed=i), i)
    return recording.trace()


def test_a_recording_agrees_and_one_of_other_weights_raises_unless_that_was_meant():
    right, wrong = recorded(Chunk(), 8), recorded(Chunk(seed=1), 8)
    for trace, least in ((right, 0.5), (wrong, 0.25), (wrong, 0)):
        chunk = Chunk()
        session = mrr.replay(chunk, trace, min_agreement=least)
        for number in range(8):
            rows = torch.arange(48).view(2, 24) + 48 * number
            session.microbatch(rows)
            chunk(tokens(2, 24, seed=number), number)
        if trace is wrong and least:
            with pytest.raises(
                mrr.RouterReplayError, match=r"3 of 3 layers \(1: -?\d+%, .*other weights.*other rows or layers"
            ):
                session.close()
        else:
            session.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_recording_agrees_in_a_session_whatever_the_default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        trace = recorded(chunk := Chunk(), 2)
        with mrr.replay(chunk, trace, ask_every_layer=True) as session:
            for number in range(2):
                session.microbatch(torch.arange(48).view(2, 24) + 48 * number)
                chunk(tokens(2, 24, seed=number), number)
    finally:
        torch.set_default_dtype(before)
    assert chunk.embedding.dtype == dtype
    assert session.report.agreement.all_layers == pytest.approx(1)


def test_routes_that_agree_little_are_warned_of_once(monkeypatch):
    monkeypatch.setattr(checks, "_warned", set())
    right = recorded(Chunk(), 4)
    routes = right.topk_indices.clone()
    routes[::2] = routes[::2].roll(1, 0)  # of another token of the sample
    half = mrr.RoutingTrace(topk_indices=routes, layer_numbers=right.layer_numbers, num_experts=right.num_experts)
    for is_first in (True, False):
        session = mrr.replay(chunk := Chunk(), half, ask_every_layer=True)
        for number in range(4):
            session.microbatch(torch.arange(48).view(2, 24) + 48 * number)
            chunk(tokens(2, 24, seed=number), number)
        if is_first:
            with pytest.warns(RuntimeWarning, match=r"the live router agrees little with .* routes: layers "):
                session.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.close()
    assert 0.25 < session.report.agreement.all_layers < 0.6


def test_a_report_remarks_on_layers_below_a_half_and_on_evidence_from_72_on():
    def remarks(shared, evidence):
        layers = {7: Sums(100, shared, 128, shared, 128)}
        return LiveAgreement(layers=layers, num_layers=1, block=Anomaly(evidence, "rows 4 to 9")).low()

    assert remarks(64, 71.9) == []
    assert remarks(63, 71.9) == [("least layer", "49%", "layer 7: routes of older weights, or of other rows?")]
    assert remarks(64, 72.0) == [("evidence of wrong rows", "72", "rows 4 to 9")]


def test_a_session_may_begin_in_inference_mode_and_go_on_in_another():
    chunk, trace = Chunk(), random_trace()
    session = mrr.replay(chunk, trace, ask_every_layer=True)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            forward(chunk, session)
    assert session.report.forwards == 9
    session.close(check=False)


@pytest.mark.parametrize(
    ("topk", "experts", "width"), [(1, 2, 2), (1, 16, 2), (2, 4, 3), (2, 8, 4), (4, 8, 5), (4, 32, 8), (8, 128, 16)]
)
def test_an_expert_is_near_in_twice_topk_or_the_better_half_and_always_one_more_than_topk(topk, experts, width):
    made = Agreement(topk=topk, num_experts=experts, num_layers=1, every_layer=False, rank=0)
    assert made.width == width
