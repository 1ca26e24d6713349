"""One wrong sample of a rollout raises on every rank, also where several ranks share its rows."""

import re
from typing import Any

import pytest

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import Case, build, run

SAMPLE, LENGTH, ROUTED = 11, 96, 95
"""The wrong sample is the fourth of the second micro-batch; its last token has no route."""


def errors(case: Case) -> list[str]:
    """Run on the rank: the errors of a replay of the model's own routes, and of one with a wrong sample."""
    _, chunks, microbatches = build(case)
    with mrr.record(chunks, padding_token_ids=[]) as recording:
        run(chunks, case, microbatches, recording, forward_only=True)
    right = recording.gather()
    routes, begin = right.topk_indices.clone(), SAMPLE * LENGTH
    routes[begin : begin + ROUTED] = routes[begin : begin + ROUTED].roll(7, 0)
    replay_mask = right.replay_mask.clone()
    replay_mask[LENGTH - 1 :: LENGTH] = False
    errors = []
    for topk_indices in (right.topk_indices, routes):
        trace = mrr.RoutingTrace(
            topk_indices=topk_indices,
            layer_numbers=right.layer_numbers,
            num_experts=right.num_experts,
            replay_mask=replay_mask,
            sequence_lengths=[LENGTH] * (case.num_tokens // LENGTH),
        )
        session = mrr.replay(chunks, trace, ask_every_layer=True)
        run(chunks, case, microbatches, session, forward_only=True)
        try:
            session.close()
        except ReplayStateError as error:
            errors.append(str(error))
        else:
            errors.append("")
    return errors


@pytest.mark.parametrize("sizes", [{}, {"tp_size": 4}, {"cp_size": 2}, {"pp_size": 2}], ids=str)
def test_one_wrong_sample_of_95_rows_raises_on_every_rank(sizes: dict[str, int], on_ranks: Any) -> None:
    layout = ParallelSizes(**sizes)
    config = {"num_moe_experts": 32, "moe_router_topk": 4, "num_layers": 2}
    case = Case(layout=layout, config=config, num_microbatches=2, batch_size=8, sequence_length=LENGTH)
    by_rank = on_ranks(layout.world_size, errors, case)
    assert [right for right, _ in by_rank] == [""] * layout.world_size
    for _, wrong in by_rank:
        named = re.search(r"sample (\d+), tokens (\d+) to (\d+), layers? [\d, ]+: routes of other tokens", wrong)
        assert named, wrong
        assert int(named[1]) == SAMPLE
