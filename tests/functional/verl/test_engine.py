"""verl's real Megatron engine with our replay: every decision at the routers, and loss and gradients to the last bit."""

from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl", reason="verl is not installed: make test-verl")

from megatron_router_replay.errors import PayloadError
from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.trainers import token_layers
from megatron_router_replay.trainers.verl import _samples, _with_tokens
from tests.functional.verl import cases
from tests.functional.verl.batches import LENGTHS
from tests.functional.verl.cases import FIXED, FULL, MOE, Case, r2, r3
from tests.support.workers import WorkersError

CASES = {
    "single-full": Case(config=FULL),
    "single-padded-full-fixed": Case(padded=True, config=FULL, batching=FIXED),
    "single-bucket-moe": Case(bucket=16, config=MOE),
    "tp2-full": Case(layout=ParallelSizes(tp_size=2), config=FULL),
    "tp2-padded-moe": Case(layout=ParallelSizes(tp_size=2), padded=True, config=MOE),
    "pp2-moe": Case(layout=ParallelSizes(pp_size=2), config=MOE),
    "pp2-padded-full": Case(layout=ParallelSizes(pp_size=2), padded=True, config=FULL),
    "pp2-vpp2-full-fixed": Case(layout=ParallelSizes(pp_size=2, vp_size=2), config=FULL, batching=FIXED),
    "cp2-padded-moe": Case(layout=ParallelSizes(cp_size=2), padded=True, config=MOE),
    "ep2-full": Case(layout=ParallelSizes(ep_size=2), config=FULL),
    "ep2-padded": Case(layout=ParallelSizes(ep_size=2), padded=True),
    "tp2-cp2-full": Case(layout=ParallelSizes(tp_size=2, cp_size=2), config=FULL),
    "tp2-cp2-padded": Case(layout=ParallelSizes(tp_size=2, cp_size=2), padded=True),
    "multimodal-full": Case(multimodal=True, config=FULL),
    "multimodal-padded-moe": Case(multimodal=True, padded=True, config=MOE),
    "multimodal-pp2-full": Case(multimodal=True, layout=ParallelSizes(pp_size=2), config=FULL),
    "multimodal-tp2-cp2-moe": Case(multimodal=True, layout=ParallelSizes(tp_size=2, cp_size=2), config=MOE),
    "multimodal-cp2-padded": Case(multimodal=True, layout=ParallelSizes(cp_size=2), padded=True),
}
if not cases.HAS_BUCKETS:
    del CASES["single-bucket-moe"]
TOKENS, SAMPLES = sum(LENGTHS), len(LENGTHS)


def check_counts(case: Case, counts: list[Counter[str]], *, replayed: int, live: int) -> None:
    """Every token of the batch went through every layer, on one rank of those that share it."""
    copies = case.layout.ep_size  # the data-parallel ranks have a batch each
    assert sum(of_rank["replayed"] for of_rank in counts) == 4 * replayed * copies
    assert sum(of_rank["live"] for of_rank in counts) == 4 * live * copies
    assert sum(of_rank["entered"] for of_rank in counts) > 0


@pytest.mark.parametrize("name", CASES)
def test_r3_is_exact_in_verls_engine(name, on_ranks):
    case = CASES[name]
    counts, metrics = zip(*on_ranks(case.layout.world_size, r3, case))
    check_counts(case, counts, replayed=TOKENS - SAMPLES, live=SAMPLES)
    # One token in SAMPLES samples is live by nature; the share is of all ranks together.
    assert metrics[-1]["router_replay/replayed_share"] == [pytest.approx((TOKENS - SAMPLES) / TOKENS)]
    assert "router_replay/recompute_flips" not in metrics[-1]


@pytest.mark.parametrize("name", CASES)
def test_r2_is_exact_in_verls_engine_with_regrouped_micro_batches(name, on_ranks):
    case = CASES[name]
    for counts in zip(*on_ranks(case.layout.world_size, r2, case)):  # of the recording, then of the replay
        check_counts(case, counts, replayed=TOKENS, live=0)


@pytest.mark.parametrize("padded", [False, True])
def test_r2_of_a_sample_that_ends_in_a_padding_token(padded, workers_1):
    assert workers_1.run(cases.r2_of_a_sample_that_ends_in_a_padding_token, Case(padded=padded)) == [[1.0]]


def test_rows_that_the_engine_lost_raise_with_the_sample(workers_1):
    ((kind, message),) = workers_1.run(cases.refused, Case(), "R3", cases.lose_rows)
    assert kind == "TraceError"
    assert "sample 1" in message
    assert "row 7" in message  # 6 tokens of the prompt, then the second of the response


def test_rows_are_needed_up_to_the_one_that_predicts_the_last_trained_token():
    """Of a prompt of 5 and a response of 4 tokens, whose last is not trained."""

    def num_rows(values, response_mask):
        output = SimpleNamespace(
            prompt_ids=[1, 2, 3, 4, 5], response_ids=[6, 7, 8, 9], response_mask=response_mask, routed_experts=values
        )
        return len(_with_tokens(lambda output: output, output).routed_experts)

    ones = torch.ones(9, 3, 2, dtype=torch.int16)
    zeros_at_the_end = torch.where(torch.arange(9).view(9, 1, 1) < 8, ones, 0)
    assert [num_rows(ones[:count], [1, 1, 1, 0]) for count in (7, 8, 9)] == [7, 8, 9]
    assert num_rows(zeros_at_the_end, [1, 1, 1, 0]) == 8
    assert num_rows(zeros_at_the_end[:, :1] * 0, [0, 0, 0, 0]) == 1
    with pytest.raises(
        PayloadError, match=r"sample 0 has 9 tokens, and its routes are \[6, 3, 2\].* with 7 rows at least"
    ):
        num_rows(ones[:6], [1, 1, 1, 0])
    unrouted = [torch.where(torch.arange(9).view(9, 1, 1) == lost, -1, ones) for lost in range(9)]
    for lost in (0, 6):
        with pytest.raises(PayloadError, match=rf"MRR802: sample 0 has no route at position {lost}, which"):
            num_rows(unrouted[lost], [1, 1, 1, 0])
    assert [num_rows(unrouted[lost], [1, 1, 1, 0]) for lost in (7, 8)] == [9, 8]


@pytest.mark.parametrize("padded", [False, True])
def test_a_sample_without_routes_only_fills_up_a_batch(padded):
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    ids, masks = [torch.arange(9), torch.arange(6)], [torch.tensor([1, 1, 0]), torch.tensor([0, 0])]
    mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True) if padded else nested(masks)
    values = [torch.zeros(len(part), 5, 2, dtype=torch.int16) for part in ids]
    data = {"input_ids": nested(ids), "response_mask": mask}
    with pytest.raises(
        PayloadError, match="sample 0: rows of routes were lost on their way: 0 of 9 positions have one, 1 are needed"
    ):
        _samples(data, nested(values), "R3")
    values[0][:7] = token_layers.add(torch.ones(7, 3, 2, dtype=torch.int16), ids[0], sample=0)
    _, routes = _samples(data, nested(values), "R3")
    assert [int((part > 0).all(2).all(1).sum()) for part in routes] == [7, 0]


def test_zeros_that_nothing_trained_can_see_are_live(workers_1):
    damage = cases.zeros_behind_the_last_generation
    ((counts, _),) = workers_1.run(cases.partly_live, Case(), damage)
    # Of sample 3 the first 2 + 7 of 14 tokens have routes, of sample 5 (12 tokens) none.
    assert counts["replayed"] == 4 * (TOKENS - SAMPLES - (13 - 9) - 11)


def test_routes_that_do_not_fit_raise_on_every_rank(workers_2):
    layout = ParallelSizes(ep_size=2)
    first, second = workers_2.run(cases.refused, Case(layout=layout), "R3", cases.lose_rows_of_rank_1)
    assert "ranks [1]" in first[1]
    assert "sample 1" in first[1]
    assert second[1].startswith("MRR103: sample 1: row 7")


@pytest.mark.parametrize(
    ("mode", "damage", "flags", "message"),
    [
        ("R3", cases.shift_by_one, {}, "sample 0: the routes at position 1, token "),
        ("R3", cases.exchange_samples, {}, "sample 0: the routes at position 0, token "),
        ("R3", cases.lose_rows_on_the_way, {}, "sample 1: rows of routes were lost on their way: 8 of 11"),
        ("R3", cases.cut_rows_on_the_way, {}, "the last row of the sample is missing"),
        ("R3", cases.lose_ids, {}, "the driver's process did not import this module"),
        ("R3", cases.drop_routes, {}, "enable_rollout_routing_replay"),
        ("R2", cases.drop_routes, {}, "keep that field in the batch"),
        ("R3", cases.nothing, {"enable_routing_replay": None}, "does not say whether to replay"),
    ],
    ids=["shifted", "exchanged", "lost", "cut", "without ids", "R3 without routes", "R2 without routes", "unmarked"],
)
def test_what_cannot_be_exact_raises(mode, damage, flags, message, workers_1):
    ((_, text),) = workers_1.run(cases.refused, Case(), mode, damage, flags)
    assert message in text


# What befalls a sample before it comes in meets the same trace as other trainers' samples, see tests/trainers.
@pytest.mark.parametrize("attack", [None, "late", "exchanged", "half of the rows", "shifted layers"])
def test_routes_that_were_wrong_before_they_came_in_raise(attack, workers_1):
    if attack is None:
        workers_1.run(cases.asked, "")
        return
    with pytest.raises(WorkersError, match="MRR"):
        workers_1.run(cases.asked, attack)


def test_a_batch_that_is_marked_off_takes_verls_own_path(workers_1):
    for mode in ("R2", "R3"):
        assert workers_1.run(cases.unmarked, Case(), mode) == [[]]
