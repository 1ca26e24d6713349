"""How the live router agrees with replayed routes: counted by hand, folded, and judged."""

import re
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay import checks
from megatron_router_replay.mcore.sessions import agreement
from megatron_router_replay.mcore.sessions.agreement import ALL, Agreement, Unit, count_rows, sum_parts
from tests.unit.mcore.tiny_chunk import ROWS, Chunk, random_trace, tokens

LAYERS = 4


def module(num_layers=LAYERS):
    return SimpleNamespace(
        index=0, module=torch.nn.Identity(), replayed_routers=range(num_layers), sequence_share=(0, 1)
    )


def asking(chunk=None, *, experts=8, topk=2, rank=0):
    made = Agreement(
        topk=topk, num_experts=experts, num_layers=LAYERS, least=0.25, every_layer=False, rank=rank, source="routes"
    )
    made.chunk = chunk or module()
    made.next_layer(made.chunk)
    return made


def ask(asks, live, used, *, number=0, layer=1, sequences=1, cu_seqlens=None, share=(0, 1), counts=None):
    shape = (len(live) // sequences, sequences)
    microbatch = SimpleNamespace(number=number, shape=shape, cu_seqlens=cu_seqlens)
    asks.chunk.sequence_share = share
    asks.add(microbatch, asks.chunk, layer, live, used.to(torch.uint8), counts)


def routes(rows, seed=0, *, experts=8, topk=2, noise=0.1):
    """The live top-k of random scores, and that of scores that differ a little."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, experts, generator=generator)
    other = scores + noise * torch.randn(rows, experts, generator=generator)
    return scores.topk(topk, dim=1).indices, other.topk(topk, dim=1).indices


def problems(*asks, least=0.25):
    return agreement.problems([each.numbers() for each in asks], least)


def test_rows_are_counted_as_by_hand_and_those_that_do_not_count_load_no_expert():
    live, used = routes(40)
    counts = torch.arange(40) % 3 != 0
    table = torch.randint(1 << 16, (16,), generator=torch.Generator().manual_seed(0))
    overlap, chance, _, counted = count_rows(torch.cat([live, used], 1).to(torch.uint8), counts, table)
    load = torch.bincount(live[counts].flatten(), minlength=8) / counts.sum()
    assert overlap.tolist() == [len({*one} & {*other}) for one, other in zip(live.tolist(), used.tolist())]
    assert torch.allclose(chance, load[used].sum(1), atol=1e-3)
    assert counted.tolist() == counts.tolist()


def test_pairs_of_routes_are_told_apart_whatever_the_order_of_their_experts():
    ids = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2], [2, 3, 0, 1], [0, 1, 2, 4]], dtype=torch.uint8)
    codes = count_rows(ids, None, torch.arange(16) ** 3 * 7919 % 256)[2].tolist()
    assert codes[0] == codes[1]
    assert len(set(codes)) == 3


@pytest.mark.parametrize(("rows", "sizes"), [(20, [20]), (191, [191]), (192, [96, 96]), (400, [100] * 4), (0, [0])])
def test_a_sample_is_cut_into_parts_of_the_rows_that_count(rows, sizes):
    counted = np.ones((5, rows + 7), dtype=np.float32)
    counted[3, :7] = 0  # rows that do not count
    sums, first = sum_parts(counted, 3)  # the first and the last sample have no row
    assert first.tolist() == [0, 1, 1 + len(sizes)]
    assert sums[1:-1, :, 0].sum(1).tolist() == sizes
    assert sums[:, :, :2].sum() == 2 * rows


# ---- what raises, what warns, what neither does


def right(live, used):
    return used


def one_late(live, used):
    return used.roll(1, 0)


def constant(live, used):
    return torch.arange(used.shape[1]).expand_as(used)


def permuted(live, used):
    return (used + 3) % 8


WRONG = {
    # what was done to routes -> in which layers, in which micro-batches, what is said
    "right": (right, {}, {}, None),
    "every layer one late": (one_late, {1, 2, 3, 4}, {0, 1, 2}, "in every layer that was judged"),
    "a constant layer": (constant, {3}, {0, 1, 2}, "in 1 of 4 layers: 3 "),
    "a layer with other ids": (permuted, {2}, {0, 1, 2}, "in 1 of 4 layers: 2 "),
    "a micro-batch one late": (one_late, {1, 2, 3, 4}, {1}, r"in 2 of 6 samples, .* in rank 0, .* micro-batch 1,"),
    "a lone sample": (one_late, {1}, {1}, r"in 1 of 6 samples, .* micro-batch 1, sequence 0:"),
}


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_routes_raise_and_name_their_place(case, topk):
    damage, layers, numbers, message = WRONG[case]
    if (case, topk) == ("a lone sample", 1):
        message = None  # two hundred decisions less those of chance are too few: it warns
    asks = asking(topk=topk)
    for number in range(3):
        for layer in range(1, LAYERS + 1):
            live, used = routes(400, 10 * number + layer, topk=topk)
            if layer in layers and number in numbers:
                used = damage(live, used)
                if case == "a lone sample":
                    used[1::2] = live[1::2]
            ask(asks, live, used, number=number, layer=layer, sequences=2)
    told = [asks.numbers()]
    found = agreement.problems(told, 0.25)
    assert bool(found) == bool(message)
    assert not agreement.problems(told, 0), "min_agreement=0 is off"
    if message:
        assert len(found) == 1
        assert "min_agreement=0 says it" in found[0]
        assert re.search(message, found[0]), found[0]
    assert bool(agreement.warning(told)) == (case != "right")


@pytest.mark.parametrize(("cp_size", "share"), [(1, (0, 1)), (2, (0, 1)), (1, (1, 2))], ids=["", "cp", "sp"])
def test_samples_of_a_packed_row_are_judged_apart(cp_size, share):
    live, used = routes(1200)
    used[550:750] = one_late(live[550:750], used[550:750])  # one of three samples
    starts = torch.tensor([0, 550, 750, 1200], dtype=torch.int32)
    whole, packed = asking(), asking()
    ask(whole, live, used)
    begins = (starts + share[0] * 1200) * cp_size
    before = [] if share[0] == 0 else [torch.zeros(1, dtype=torch.int32)]
    lengths = torch.cat([*before, begins])
    ask(packed, live, used, cu_seqlens=lengths, share=share)
    lengths.fill_(1200)  # a trainer's buffer, which gets the lengths of the next micro-batch
    assert (problems(whole), whole.numbers()["least"][0] < 0.25) == ([], True), "diluted"
    assert "in 1 of 3 samples" in problems(packed)[0]
    assert f"micro-batch 0, sequence {1 + share[0]}:" in problems(packed)[0]


def test_layers_of_two_micro_batches_that_run_by_turns_are_judged_apart():
    asks = asking()
    for layer in range(1, LAYERS + 1):
        for number in range(2):
            live, used = routes(30, 10 * number + layer)  # too short a sample to be judged in one layer
            ask(asks, live, one_late(live, used) if number else used, number=number, layer=layer)
    assert asks.numbers()["low"][:2] == [1, 2]


@pytest.mark.parametrize(("samples", "raises"), [(1000, True), (3000, True), (4000, False)])
def test_what_is_low_must_have_more_evidence_in_a_session_of_thousands_of_samples(samples, raises):
    told = {"layers": {}, "low": [2, samples, 600.0], "least": [0.1, "rank 0"]}
    assert bool(agreement.problems([told], 0.25)) == raises


def test_a_run_of_one_token_at_a_near_tie_is_no_evidence():
    asks = asking(topk=1)
    ask(asks, torch.zeros(4000, 1, dtype=torch.int64), torch.ones(4000, 1, dtype=torch.int64))
    assert problems(asks) == []
    assert (asks.report().judged, asks.report().least_sample) == ({}, None)
    live, used = routes(191)  # and no run drowns the rows around it
    used[40:], live[40:] = torch.tensor([0, 1]), torch.tensor([2, 3])
    asks = asking()
    ask(asks, live, used)
    assert asks.numbers()["low"][:2] == [0, 1]
    assert 0.4 < asks.report().least_sample < 0.7, "the run is an eighth of 191 rows, beside 40 that agree"
    used[:40] = used[:40].roll(1, 0)  # one that agrees counts in full
    used[40:] = live[40:]
    asks = asking()
    ask(asks, live, used)
    assert asks.report().least_sample > 0.4


@pytest.mark.parametrize("hot_share", [0.5, 0.9, 0.98])
def test_a_top_1_router_with_a_hot_expert_is_legal(hot_share):
    """An early rule refused up to 42 % of such routes, because most rows name one expert."""
    for seed in range(20):
        asks, generator = asking(topk=1), torch.Generator().manual_seed(seed)
        for number in range(10):
            scores = torch.randn(400, 8, generator=generator)
            margin = scores[:, 1:].max(1).values - scores[:, 0]
            scores[:, 0] += margin.quantile(hot_share)
            live = scores.topk(1).indices
            used = (scores + 0.1 * torch.randn(scores.shape, generator=generator)).topk(1).indices
            ask(asks, live, used, number=number, layer=number % 4 + 1, sequences=2)
        told = [asks.numbers()]
        assert (agreement.problems(told, 0.25), agreement.warning(told)) == ([], None)


@pytest.mark.parametrize(("rows", "judged"), [(31, 0), (32, 1)])
def test_a_sample_of_fewer_than_32_rows_is_not_judged(rows, judged):
    live, used = routes(rows, experts=64, topk=8)
    asks = asking(experts=64, topk=8)
    ask(asks, live, one_late(live, used))
    assert asks.numbers()["low"][:2] == [judged, judged]


@pytest.mark.parametrize(("experts", "low"), [(5, 0), (6, 1)])
def test_a_block_of_few_different_routes_is_not_judged(experts, low):
    live = torch.arange(96).unsqueeze(1) % experts  # eight decisions of each count
    asks = asking(topk=1)
    ask(asks, live, (live + 1) % experts)
    assert asks.numbers()["low"][:2] == [low, low]


def test_rows_that_do_not_count_are_not_judged():
    live, used = routes(200)
    counts = torch.arange(200) < 100
    used[~counts] = used[~counts].roll(1, 0)
    asks = asking()
    ask(asks, live, used, counts=counts)
    assert asks.report().all_layers > 0.85
    assert asks.report().layers[1].rows == 100


def test_a_layer_with_too_few_rows_is_judged_with_those_of_the_sessions_before():
    chunk, judged = module(), []
    for session in range(8):
        asks = asking(chunk)
        live, used = routes(16, session)
        ask(asks, live, one_late(live, used) if session < 3 else used, layer=2)
        judged.append([Unit(*sums).rows for sums in asks.numbers()["layers"].values()])
    assert judged == [[], [], [48], [], [], [48], [], []]
    assert asking(module()).numbers()["layers"] == {}, "another chunk has nothing of it"


def test_the_rotation_goes_on_from_session_to_session_and_is_a_chunks_own():
    chunk, other = module(), module()
    asked = []
    for _ in range(2):
        asks = Agreement(topk=2, num_experts=8, num_layers=4, least=0.25, every_layer=False, rank=0, source="")
        asked += [asks.next_layer(chunk) for _ in range(3)]
    assert asked == [ALL, 0, 1, 2, 3, 0]
    assert asks.next_layer(other) == ALL


def test_a_long_session_folds_what_it_holds_and_says_the_same(monkeypatch):
    told = []
    for limit in (1 << 20, 300):
        monkeypatch.setattr(agreement, "FOLD_ROWS", limit)
        asks, waiting = asking(), []
        for number in range(12):
            live, used = routes(200, number)
            ask(asks, live, one_late(live, used) if number == 7 else used, number=number, layer=number % 4 + 1)
            waiting.append(len(asks._asked))
        told.append(asks.numbers())
        assert max(waiting) == (12 if limit > 300 else 2)
    for layer, sums in told[0]["layers"].items():
        assert told[1]["layers"][layer] == pytest.approx(sums)
    assert {**told[0], "layers": None} == {**told[1], "layers": None}


def test_layers_add_up_over_ranks_and_failing_parts_of_all_of_them_raise_together():
    ranks = []
    for rank in range(4):
        asks = asking(rank=rank)
        for number in range(2):
            live, used = routes(100, 10 * rank + number)
            ask(asks, live, one_late(live, used) if rank < 3 and number else used, number=number, layer=1 + rank // 2)
        ranks.append(asks)
    (problem,) = problems(*ranks)
    assert "in 3 of 8 samples" in problem


def test_a_layer_of_one_rank_that_is_wrong_raises_on_all():
    everyone = [{"layers": {str(layer): [100, 100, 150, 99]}, "low": [0, 1, 0.0], "least": [1.0, ""]}
                for layer in (1, 2)]  # fmt: skip
    everyone[1]["layers"]["3"] = [100, 10, 150, 99]
    (problem,) = agreement.problems(everyone, 0.25)
    assert "in 1 of 3 layers: 3 (7%)" in problem


# ---- in a session


def test_every_session_asks_one_layer_a_micro_batch_and_all_in_the_first():
    chunk = Chunk()
    counted = []
    for _ in range(2):
        with mrr.replay(chunk, random_trace(24)) as session:
            for number in range(3):
                session.microbatch(ROWS + 8 * number)
                chunk(tokens(), number)
        counted.append({layer: unit.rows for layer, unit in session.report.agreement.layers.items()})
    assert counted == [{1: 16, 2: 16, 3: 8}, {1: 8, 2: 8, 3: 8}]
    with mrr.replay(chunk, random_trace(8), ask_every_layer=True) as session:
        session.microbatch(ROWS)
        chunk(tokens())
    assert {layer: unit.rows for layer, unit in session.report.agreement.layers.items()} == {1: 8, 2: 8, 3: 8}
    with mrr.replay(chunk, random_trace(8), min_agreement=0) as session:
        session.microbatch(ROWS)
        chunk(tokens())
    assert session.report.agreement is None


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
            with pytest.raises(mrr.RouterReplayError, match=r"in every layer that was judged .*weight_versions="):
                session.close()
        else:
            session.close()
    assert Unit(2, 2.0, 3.0).agreement == pytest.approx(2 / 3)


def test_routes_that_agree_little_are_warned_of_once(monkeypatch):
    monkeypatch.setattr(checks, "_warned", set())
    right = recorded(Chunk(), 1)
    routes = right.topk_indices.clone()
    routes[::2] = routes[::2].roll(1, 0)  # of another token of the sample
    half = mrr.RoutingTrace(topk_indices=routes, layer_numbers=right.layer_numbers, num_experts=right.num_experts)
    shown = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            chunk = Chunk()
            with mrr.replay(chunk, half) as session:
                session.microbatch(torch.arange(48).view(2, 24))
                chunk(tokens(2, 24, seed=0), 0)
        shown.append([str(each.message) for each in caught if each.category is RuntimeWarning])
    assert 0.25 < session.report.agreement.all_layers < 0.6
    assert [len(each) for each in shown] == [1, 0]
    assert "the live router agrees little with the replayed routes (layers " in shown[0][0]
