"""Balancing under replay on real Megatron-Core, for every split of tokens and layers over ranks.

Expected counts are added up from the trace by hand, for the whole batch; the ranks' counters must add up to them. Expected
losses are Megatron-Core's own function of the logits of the tokens of all ranks, put together by hand without padding.
"""

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import (
    DRAWN,
    FULL,
    MEGATRON,
    MOE,
    MTP_RECOMPUTE,
    Case,
    build,
    in_backward,
    moe_routers,
    random_trace,
    rows_seen,
    run,
)
from tests.unit.mcore.balanced_chunk import logged, switch_loss

COEFFICIENT = 0.5
BALANCED: dict[str, Any] = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [COEFFICIENT, COEFFICIENT],
}
NUM_EXPERTS, TOPK, LENGTH = 8, 2, 8

CASES = {
    "single-full": Case(config=BALANCED | FULL),
    "tp2-sp": Case(layout=ParallelSizes(tp_size=2), config=BALANCED | MOE),
    "cp2-full": Case(layout=ParallelSizes(cp_size=2), config=BALANCED | FULL),
    "pp2-vpp2-moe": Case(layout=ParallelSizes(pp_size=2, vp_size=2), config=BALANCED | MOE),
    "tp2-cp2-full": Case(layout=ParallelSizes(tp_size=2, cp_size=2), config=BALANCED | FULL),
}


def not_compiled() -> Any:
    """Megatron-Core compiles the method that counts, on every rank and anew for every shape: ten seconds each."""
    return torch.compiler.set_stance("force_eager")


def is_padding(rows: Tensor) -> Tensor:
    """Every fifth row of the batch: sequences of several lengths, ranks with several numbers of them."""
    return rows % 5 == 3


def build_padded(case: Case) -> tuple[Any, list[Any], list[dict[str, Any]]]:
    config, chunks, microbatches = build(case)
    for microbatch in microbatches:
        microbatch["padding"] = is_padding(microbatch["routing_rows"])
        microbatch["routing_rows"] = microbatch["routing_rows"].masked_fill(microbatch["padding"], -1)
    return config, chunks, microbatches


def replay_balanced(case: Case) -> dict[str, Any]:
    """Replay one step on this rank: its counters, what it logged of losses, and rows and logits of each router call."""
    _, chunks, microbatches = build_padded(case)
    logits: dict[int, list[Tensor]] = defaultdict(list)
    for router in moe_routers(chunks):

        def gating(hidden: Tensor, gating: Any = router.gating, layer: int = router.layer_number) -> Tensor:
            result: Tensor = gating(hidden)
            if not in_backward():
                logits[layer].append(result.detach().flatten(0, 1).clone())
            return result

        router.gating = gating
    for name in ("load_balancing_loss", "seq_load_balancing_loss"):
        logged(name)
    with not_compiled(), mrr.replay(chunks, random_trace(case), **DRAWN) as session:
        run(chunks, case, microbatches, session)
    return {
        "counted": {router.layer_number: router.local_tokens_per_expert.tolist() for router in moe_routers(chunks)},
        "logged": {name: logged(name) for name in ("load_balancing_loss", "seq_load_balancing_loss")},
        "rows": [rows_seen(case, microbatch) for microbatch in microbatches],
        "logits": dict(logits),
        "decisions": session.report.decisions["counted"],
    }


def counts_by_hand(case: Case) -> dict[int, list[float]]:
    tokens = torch.arange(case.num_tokens)
    routes = random_trace(case).topk_indices[~is_padding(tokens)]
    return {
        layer: torch.bincount(routes[:, layer - 1].flatten(), minlength=NUM_EXPERTS).float().tolist()
        for layer in range(1, 5)
    }


def losses_by_hand(case: Case, ranks: list[dict[str, Any]], layer: int) -> tuple[float, float]:
    """Return (aux_loss, seq_aux_loss) of a layer, over all micro-batches: of the tokens of all ranks that have it."""
    totals = [0.0, 0.0]
    holders = [rank for rank in ranks if layer in rank["logits"]]
    for number in range(case.num_microbatches):
        rows = torch.cat([rank["rows"][number] for rank in holders])
        logits = torch.cat([rank["logits"][layer][number] for rank in holders])
        order = rows.argsort()[rows.sort().values >= 0]  # without padding, sequence behind sequence
        rows, scores = rows[order], torch.sigmoid(logits[order])
        scores = scores / scores.sum(dim=1, keepdim=True)
        chosen = torch.zeros_like(scores).scatter(1, scores.topk(TOPK, dim=1).indices, 1.0)
        totals[0] += float(switch_loss(scores, chosen.sum(0), len(rows), 1.0))
        of_sequence = rows // LENGTH
        for sequence in of_sequence.unique():
            own = of_sequence == sequence
            part = switch_loss(scores[own], chosen[own].sum(0), len(rows) / case.batch_size, 1.0)
            totals[1] += float(part) / case.batch_size
    return totals[0], totals[1]


@pytest.mark.parametrize("name", CASES)
def test_every_split_counts_the_tokens_of_the_batch_once_and_padding_never(name, on_ranks):
    case = CASES[name]
    ranks = on_ranks(case.layout.world_size, replay_balanced, case)
    counted: dict[int, Tensor] = {}
    for rank in ranks:
        for layer, counts in rank["counted"].items():
            counted[layer] = counted.get(layer, torch.zeros(NUM_EXPERTS)) + torch.tensor(counts)
    assert {layer: counts.tolist() for layer, counts in counted.items()} == counts_by_hand(case)
    num_tokens = int((~is_padding(torch.arange(case.num_tokens))).sum())
    assert sum(rank["decisions"] for rank in ranks) == 4 * num_tokens
    for layer in range(1, 5):
        by_hand = losses_by_hand(case, ranks, layer)
        # Each rank logs its own part; Megatron-Core adds them up over the ranks when it reports.
        for name_of_log, expected in zip(("load_balancing_loss", "seq_load_balancing_loss"), by_hand):
            parts = [rank["logged"][name_of_log][layer - 1] for rank in ranks if layer in rank["logits"]]
            assert float(sum(parts)) == pytest.approx(expected, rel=1e-4)


def bias_updates(choice: str) -> dict[int, list[float]]:
    """Two optimizer steps' worth of Megatron-Core's own update and reset, before each a step of replay."""
    from megatron.core.distributed.finalize_model_grads import (
        _update_router_expert_bias,
        reset_model_temporary_tensors,
    )

    case = CASES["cp2-full"]
    config, chunks, microbatches = build_padded(case)
    group = () if MEGATRON < (0, 19) else (moe_routers(chunks)[0].tp_dp_cp_group,)
    with not_compiled(), mrr.replay(chunks, random_trace(case), expert_bias=choice, **DRAWN) as session:
        for _ in range(2):
            run(chunks, case, microbatches, session)
            _update_router_expert_bias(chunks, config, *group)
            reset_model_temporary_tensors(config, chunks)
    return {router.layer_number: router.expert_bias.tolist() for router in moe_routers(chunks)}


@pytest.mark.parametrize("choice", ["replayed", "off"])
def test_megatrons_own_update_moves_the_bias_by_the_tokens_alone(choice, on_ranks):
    expected = {}
    for layer, counts in counts_by_hand(CASES["cp2-full"]).items():
        mean = sum(counts) / NUM_EXPERTS
        steps = [0 if choice == "off" or count == mean else (1 if count < mean else -1) for count in counts]
        expected[layer] = pytest.approx([2 * 0.001 * one for one in steps])
    assert on_ranks(2, bias_updates, choice) == [expected, expected]


def test_layers_of_multi_token_prediction_leave_padding_out_too(megatron):
    """MTP layers that stay live under a replay know the padding of the micro-batch beside which they run."""
    case = Case(config=BALANCED | {"mtp_num_layers": 1, "num_layers": 2} | MTP_RECOMPUTE, num_microbatches=2)
    _, chunks, microbatches = build_padded(case)
    with not_compiled(), mrr.replay(chunks, random_trace(case, (1, 2)), **DRAWN) as session:
        run(chunks, case, microbatches, session)
    routers = moe_routers(chunks) + moe_routers(chunks, mtp=True)
    num_tokens = int((~is_padding(torch.arange(32))).sum())
    assert [router.local_tokens_per_expert.sum().item() for router in routers] == [num_tokens * TOPK] * 3


def disagreeing_ranks() -> None:
    """Of one context-parallel group, only the first rank tells the session of padding."""
    import torch.distributed as dist

    case = Case(layout=ParallelSizes(cp_size=2), config=BALANCED, num_microbatches=2)
    _, chunks, microbatches = build(case)
    for microbatch in microbatches:
        if dist.get_rank() == 0:
            microbatch["padding"] = torch.zeros_like(microbatch["routing_rows"], dtype=torch.bool)
    not_told = r"ranks that share an auxiliary loss \(those of rank 0\) were not told of padding in the same"
    with (
        pytest.raises(mrr.RouterReplayError, match=not_told),
        mrr.replay(chunks, random_trace(case), **DRAWN) as session,
    ):
        run(chunks, case, microbatches, session)


def test_ranks_that_balance_differently_raise_on_all(on_ranks):
    on_ranks(2, disagreeing_ranks)
