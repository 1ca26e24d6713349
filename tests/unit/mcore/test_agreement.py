"""Agreement of the live router with replayed routes: counts by hand, and the sums of ranks."""

import json
import re
import warnings
from types import SimpleNamespace

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay import checks
from megatron_router_replay.mcore.sessions import agreement
from megatron_router_replay.mcore.sessions.agreement import Agreement, number_windows
from tests.unit.mcore.tiny_chunk import ROWS, Chunk, forward, random_trace, tokens

LAYERS = 4


def asking(*, experts=8, topk=2, rank=0, sharing=(0, 1, 0), share=(0, 1)):
    made = Agreement(topk=topk, num_experts=experts, num_layers=LAYERS, least=0.25, every_layer=False, rank=rank)
    made.chunk = SimpleNamespace(
        index=0,
        module=torch.nn.Identity(),
        replayed_routers=range(LAYERS),
        row_sharing=sharing,
        sequence_share=share,
    )
    made.next_layer(made.chunk)
    return made


def sharing(num_ranks, **options):
    """The ranks of a group that have a part each of every sequence."""
    return [asking(rank=rank, sharing=(0, num_ranks, 0), **options) for rank in range(num_ranks)]


def ask(asks, live, used, *, number=0, layer=1, sequences=1, cu_seqlens=None, counts=None):
    microbatch = SimpleNamespace(number=number, shape=(len(live) // sequences, sequences), cu_seqlens=cu_seqlens)
    asks.add(microbatch, asks.chunk, layer, live, used, counts)


def routes(rows, seed=0, *, experts=8, topk=2, noise=0.1):
    """The live top-k of random scores, and that of scores that differ a little."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, experts, generator=generator)
    other = scores + noise * torch.randn(rows, experts, generator=generator)
    return scores.topk(topk, dim=1).indices, other.topk(topk, dim=1).indices


def found(*asks, least=0.25):
    """Return the problem that the ranks of a session raise, or "", and whether they warn."""
    told = json.loads(json.dumps([each.numbers() for each in asks]))  # as ranks publish them
    problems, warnings = agreement.judge(told, least)
    return "".join(problems), bool(warnings)


# ---- counting
def test_rows_are_counted_as_by_hand_whatever_the_order_of_experts():
    live, used = routes(120, 1, experts=4)
    counts = torch.arange(120) % 3 != 0
    asks = asking(experts=4)
    ask(asks, live, used, counts=counts)
    ask(asks, live.flip(1), used.flip(1), counts=counts, layer=2)
    load = torch.bincount(live[counts].flatten(), minlength=4) / 80
    pairs = {}
    for one, other in zip(live[counts].tolist(), used[counts].tolist()):
        shared, chance = len({*one} & {*other}), float(load[other].sum())
        pairs.setdefault((frozenset(one), frozenset(other)), []).append((shared - chance, 2 - shared, 2 - chance))
    columns = [[sum(column) for column in zip(*rows)] for rows in pairs.values()]
    assert max(missed for _, missed, _ in columns) < 8 < max(beyond for *_, beyond in columns)
    shared, missed = (sum(each[i] for each in columns) for i in (0, 1))
    evidence = sum(min(8, beyond) for *_, beyond in columns)
    expected = pytest.approx((80, shared, shared + missed, evidence), rel=1e-5)
    assert asks.report().layers == {1: expected, 2: expected}
    ask(asks, live, used, counts=torch.zeros(120, dtype=torch.bool), number=1)
    assert asks.report().layers == {1: expected, 2: expected}, "no row is no number that spoils others"
    ask(asks, live[:60], used[:60], number=2)
    assert asks.report().layers[1].rows == 140, "a report is of all calls so far"


STARTS = [0, 550, 550, 750, 1200]
"""Of packed sequences: three, and one without a token."""


@pytest.mark.parametrize(("tp_size", "cp_size"), [(1, 1), (1, 2), (3, 1), (2, 2)])
def test_windows_are_128_positions_of_one_sequence(tp_size, cp_size):
    n, device = 1200 // tp_size, torch.device("cpu")
    for rank in range(tp_size):
        lengths = torch.tensor(STARTS, dtype=torch.int32) * cp_size
        num_sequences, sequence_of, sequences, window = number_windows((n, 1), (rank, tp_size), lengths, device)
        lengths.zero_()  # a trainer's buffer, which gets the lengths of the next micro-batch
        expected = []
        for row in range(n):
            sequence = sum(row + rank * n >= end for end in STARTS[1:])
            expected.append((sequence, (row - max(0, STARTS[sequence] - rank * n)) // 128))
        assert sequence_of[window].tolist() == sequences.tolist() == [sequence for sequence, _ in expected]
        assert num_sequences == len(STARTS)
        names = dict(zip(window.tolist(), expected))
        assert [names[number] for number in window.tolist()] == expected, "a window has one name"
        assert len(names) == len(set(expected)), "and a name one window"


def test_windows_of_a_batch_are_128_positions_of_one_column():
    num_sequences, sequence_of, sequences, window = number_windows((300, 2), (0, 1), None, torch.device("cpu"))
    assert window.view(300, 2)[[0, 127, 128, 299]].tolist() == [[0, 1], [0, 1], [2, 3], [4, 5]]
    assert (num_sequences, sequence_of.tolist(), sequences.tolist()) == (2, [0, 1] * 3, [0, 1] * 300)


def test_a_packed_row_of_no_sequence_is_one_sequence():
    num_sequences, _, sequences, _ = number_windows((2, 1), (0, 1), torch.tensor([0]), torch.device("cpu"))
    assert (num_sequences, sequences.tolist()) == (1, [0, 0])


# ---- wrong routes
def one_late(live, used):
    return used.roll(1, 0)


WRONG = {
    # damage -> how, in which layers, in which micro-batches, the message
    "right": (lambda live, used: used, {}, {}, ""),
    "every layer one late": (one_late, {1, 2, 3, 4}, {0, 1, 2}, "in 4 of 4 layers"),
    "a constant layer": (
        lambda live, used: torch.arange(used.shape[1]).expand_as(used),
        {3},
        {0, 1, 2},
        "in 1 of 4 layers",
    ),
    "a layer with other ids": (lambda live, used: (used + 3) % 8, {2}, {0, 1, 2}, "in 1 of 4 layers"),
    "a micro-batch one late": (
        one_late,
        {1, 2, 3, 4},
        {1},
        r"in 8 of 24 samples .* micro-batch 1, .*routes of other tokens",
    ),
    "a lone sample": (
        one_late,
        {1},
        {1},
        r"in 1 of 24 samples .*rank 0, chunk 0, micro-batch 1, layer 1, sequence 0 \(-?\d+%\)",
    ),
}


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_routes_raise_and_name_their_place(case, topk):
    damage, layers, numbers, message = WRONG[case]
    if (case, topk) == ("a lone sample", 1):
        message = ""  # two hundred decisions less those of chance are too few: it warns
    asks = asking(topk=topk)
    for number in range(3):
        for layer in range(1, LAYERS + 1):
            live, used = routes(400, 10 * number + layer, topk=topk)
            if layer in layers and number in numbers:
                used = damage(live, used)
                if case == "a lone sample":
                    used[1::2] = live[1::2]
            ask(asks, live, used, number=number, layer=layer, sequences=2)
    problem, warns = found(asks)
    assert bool(problem) == bool(message)
    assert re.search(message, problem), problem
    assert found(asks, least=0) == ("", False), "min_agreement=0 is off"
    assert warns == (case != "right" and not problem)


def test_one_of_the_packed_samples_that_is_wrong_raises():
    live, used = routes(1200)
    packed = asking()
    ask(packed, live, used, cu_seqlens=torch.tensor([0, 600, 1200]))
    used[550:750] = one_late(live[550:750], used[550:750])
    ask(packed, live, used, number=1, cu_seqlens=torch.tensor(STARTS, dtype=torch.int32))
    assert re.search(r"in 1 of 5 samples .* micro-batch 1, layer 1, sequence 2 ", found(packed)[0])
    live, used = routes(2048)
    used[1024:] = used[1024]  # half of a sample repeats one route
    half = asking()
    ask(half, live, used)
    assert "in 1 of 1 samples" in found(half)[0]


@pytest.mark.parametrize(("samples", "raises"), [(1000, True), (3000, True), (4000, False)])
def test_what_is_low_must_have_more_evidence_in_a_session_of_thousands_of_samples(samples, raises):
    told = {"replica": 0, "layers": {}, "low": [samples, 2, 600.0], "least": [0.1, "rank 0"], "parts": []}
    assert bool(agreement.judge([told], 0.25)[0]) == raises


# ---- legal routes
def test_a_run_of_one_token_at_a_near_tie_is_no_evidence():
    asks = asking(topk=1)
    ask(asks, torch.zeros(4000, 1, dtype=torch.int64), torch.ones(4000, 1, dtype=torch.int64))
    assert found(asks) == ("", False)
    report = asks.report()
    assert (report.judged, report.least_sample, report.samples, report.samples_not_judged) == ({}, None, 1, 1)
    live, used = routes(128)  # and no run drowns the rows around it
    used[40:], live[40:] = torch.tensor([0, 1]), torch.tensor([2, 3])
    asks = asking()
    ask(asks, live, used)
    assert 0.5 < asks.report().least_sample < 0.9


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_long_loop_of_few_near_ties_counts_once(ranks):
    """Each window of it is low; a window alone has enough evidence."""
    generator = torch.Generator().manual_seed(0)
    loop = torch.rand(8, 32, generator=generator).topk(4).indices[torch.arange(4096) % 8]
    asks = sharing(ranks, experts=32, topk=4)
    for each, part in zip(asks, loop.chunk(ranks)):
        filler, _ = routes(4096, experts=32, topk=4)  # another sample, or all tokens are as chance has them
        live = torch.stack([part, filler[: len(part)]], 1).flatten(0, 1)
        ask(each, live, torch.stack([(part + 16) % 32, filler[: len(part)]], 1).flatten(0, 1), sequences=2)
    assert found(*asks) == ("", True)


def near_ties(rows, pairs):
    """Rows of which each is one of a few near-ties: the live expert, and the next one."""
    live = torch.arange(rows).unsqueeze(1) % pairs
    return live, (live + 1) % 8


@pytest.mark.parametrize(("low_rows", "right_rows", "ranks"), [(56, 40, 4), (128, 128, 8)])
def test_a_loop_of_near_ties_counts_once_also_where_ranks_have_a_part_each(low_rows, right_rows, ranks):
    """Rows of four near-ties and others that agree, in one or two windows of one rank or in parts of them."""
    low, least = [], []
    for num_ranks in (1, ranks):
        asks = sharing(num_ranks, topk=1)
        live, used = near_ties(low_rows // num_ranks, 4)
        right = torch.arange(right_rows // num_ranks).unsqueeze(1) % 6
        order = torch.rand(len(live) + len(right), generator=torch.Generator().manual_seed(0)).argsort()
        for each in asks:
            ask(each, torch.cat([live, right])[order], torch.cat([used, right])[order])
        group = agreement._add_up_ranks([each.numbers() for each in asks], 0.25)
        low.append((group.judged, group.low))
        least.append(group.least[0])
    assert low == [(1, 0), (1, 0)]
    assert least[0] == pytest.approx(least[1], abs=0.05)


def test_a_token_at_near_ties_that_fills_half_of_each_sample_leaves_its_layer_legal():
    asks = asking(topk=1)
    for number in range(4):
        live, used = routes(2048, number, topk=1)
        live[1024:], used[1024:] = near_ties(1024, 4)
        ask(asks, live, used, number=number)
    assert found(asks) == ("", False)
    assert asks.report().judged[1] > 0.5


@pytest.mark.parametrize("hot_share", [0.5, 0.98])
def test_a_top_1_router_with_a_hot_expert_is_legal(hot_share):
    """An early rule refused up to 42 % of such routes, because most rows name one expert."""
    for seed in range(10):
        asks, generator = asking(topk=1), torch.Generator().manual_seed(seed)
        for number in range(10):
            scores = torch.randn(400, 8, generator=generator)
            margin = scores[:, 1:].max(1).values - scores[:, 0]
            scores[:, 0] += margin.quantile(hot_share)
            used = (scores + 0.1 * torch.randn(scores.shape, generator=generator)).topk(1).indices
            ask(asks, scores.topk(1).indices, used, number=number, layer=number % 4 + 1, sequences=2)
        assert found(asks) == ("", False)


def judged_and_low(ranks, live, used, **options):
    """Return how many samples are judged and low, of one sample that so many ranks have a part each of."""
    asks = sharing(ranks, **options)
    for each, *parts in zip(asks, live.chunk(ranks), used.chunk(ranks)):
        assert each.numbers()["low"] == [0, 0, 0]
        ask(each, *parts)
    group = agreement._add_up_ranks([each.numbers() for each in asks], 0.25)
    return group.judged, group.low


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("rows", "judged"), [(31, 0), (32, 1)])
def test_a_sample_of_fewer_than_32_rows_is_not_judged(rows, judged, ranks):
    live, used = routes(rows, experts=64, topk=8)
    assert judged_and_low(ranks, live, one_late(live, used), experts=64, topk=8) == (judged, judged)
    asks = asking(experts=64, topk=8)
    ask(asks, live, one_late(live, used))
    assert asks.report().samples_not_judged == 1 - judged
    ask(asks, live[:, :1] * 0, live[:, :1] * 0, layer=2)
    assert asks.report().samples_not_judged == 1 - judged, "one layer is enough"


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(("experts", "low"), [(5, 0), (6, 1)])
def test_a_block_of_few_different_routes_is_not_judged(experts, low, ranks):
    live = torch.arange(96).unsqueeze(1) % experts  # eight decisions of each count
    assert judged_and_low(ranks, live, (live + 1) % experts, topk=1) == (low, low)


# ---- ranks
def one_wrong_sample(seed, tp_size):
    """Ranks of a session of 24 samples of 95 rows and one of padding; one sample of a micro-batch is of other tokens."""
    asks = sharing(tp_size, experts=32, topk=8)
    counts = (torch.arange(96) < 95).unsqueeze(1).expand(96, 8)
    for number in range(3):
        live, used = (x.view(96, 8, 8).clone() for x in routes(96 * 8, 10 * seed + number, experts=32, topk=8))
        if number == 1:
            used[:, 5] = used[:, 5].roll(7, 0)
        for each, *parts in zip(asks, *(x.chunk(tp_size) for x in (live, used, counts))):
            live_part, used_part, counted = (part.flatten(0, 1) for part in parts)
            ask(each, live_part, used_part, counts=counted, number=number, layer=number + 1, sequences=8)
    return asks


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
def test_one_wrong_sample_of_95_rows_raises_however_many_ranks_share_it(tp_size):
    for seed in range(5):
        problem, _ = found(*one_wrong_sample(seed, tp_size))
        assert re.search(r"in \d of \d+ samples in a layer, .*micro-batch 1, layer 2, sequence 5 ", problem)
        assert ("those that share its sequences" in problem) == (tp_size > 2)


@pytest.mark.parametrize("wrong", [False, True])
def test_few_wrong_rows_on_each_of_many_ranks_add_up(wrong):
    asks = [asking(rank=rank, sharing=(0, 1, rank)) for rank in range(64)]
    for rank, each in enumerate(asks):
        live, used = routes(12, rank)
        ask(each, live, one_late(live, used) if wrong else used)
    problem, _ = found(*asks)
    assert ("in 1 of 1 layers" in problem) == wrong
    assert [each.report().samples_not_judged for each in asks] == [1] * 64


@pytest.mark.parametrize(("wrong", "step", "result"), [((0, 1, 2, 3), 2, "warns"), ((2,), 1, "raises")])
def test_ranks_with_the_same_rows_count_once_and_one_that_is_wrong_alone_raises(wrong, step, result):
    asks = [asking(rank=rank, sharing=(rank, 1, 0)) for rank in range(4)]
    for rank, each in enumerate(asks):
        for layer in range(1, LAYERS + 1):
            live, used = routes(200, layer)
            if rank in wrong and layer == 1:  # one of two sequences of 100 rows: 175 decisions beyond chance
                used[::step] = one_late(live[::step], used[::step])
            ask(each, live, used, layer=layer, sequences=2)
    problem, warns = found(*asks)
    assert (bool(problem), warns) == {"warns": (False, True), "raises": (True, False)}[result]


def test_failing_samples_of_all_ranks_raise_together():
    ranks = [asking(rank=rank) for rank in range(4)]
    for rank, asks in enumerate(ranks):
        for number in range(2):
            live, used = routes(100, 10 * rank + number)
            ask(asks, live, one_late(live, used) if rank < 3 and number else used, number=number, layer=1 + rank // 2)
    assert "in 3 of 8 samples" in found(*ranks)[0]


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


def recorded(chunk, number):
    with mrr.record(chunk) as recording:
        for i in range(number):
            recording.microbatch(torch.arange(48).view(2, 24) + 48 * i)
            chunk(tokens(2, 24, seed=i), i)
    return recording.trace()


def test_a_recording_agrees_and_one_of_other_weights_raises_unless_that_was_meant():
    right, wrong = recorded(Chunk(), 4), recorded(Chunk(seed=1), 4)
    for trace, least in ((right, 0.5), (wrong, 0.25), (wrong, 0)):
        chunk = Chunk()
        session = mrr.replay(chunk, trace, min_agreement=least)
        for number in range(4):
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


def test_routes_that_agree_little_are_warned_of_once(monkeypatch):
    monkeypatch.setattr(checks, "_warned", set())
    right = recorded(Chunk(), 1)
    routes = right.topk_indices.clone()
    routes[::2] = routes[::2].roll(1, 0)  # of another token of the sample
    half = mrr.RoutingTrace(topk_indices=routes, layer_numbers=right.layer_numbers, num_experts=right.num_experts)
    for is_first in (True, False):
        session = mrr.replay(chunk := Chunk(), half)
        session.microbatch(torch.arange(48).view(2, 24))
        chunk(tokens(2, 24, seed=0), 0)
        if is_first:
            with pytest.warns(RuntimeWarning, match=r"the live router agrees little with .* routes \(layers "):
                session.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session.close()
    assert 0.25 < session.report.agreement.all_layers < 0.6


def test_a_session_may_begin_in_inference_mode_and_go_on_in_another():
    chunk, trace = Chunk(), random_trace()
    session = mrr.replay(chunk, trace, ask_every_layer=True)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            forward(chunk, session)
    assert session.report.forwards == 9
    session.close(verify=False)
