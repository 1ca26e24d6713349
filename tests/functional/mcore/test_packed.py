"""Packed sequences from the collator, split over context-parallel ranks, trained with replay on: the same as unsplit."""

from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.layout import collate_packed, split_batch
from megatron_router_replay.testing import (
    GlooWorkers,
    ParallelSizes,
    build_tiny_gpt,
    gradients,
    merge_by_name,
    run_schedule,
    tiny_gpt_config,
)
from tests.functional.mcore.cases import FULL, as_map, moe_routers, random_routes, watched

LENGTHS = (5, 16, 9)


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    result = []
    for length in LENGTHS:
        tokens = torch.randint(320, (length + 1,), generator=generator)
        result.append({"input_ids": tokens[:-1], "labels": tokens[1:], "loss_mask": torch.ones(length)})
    return result


def the_trace() -> mrr.RoutingTrace:
    """Random routes for every token but the last of each sample, as engines send them."""
    has_route = torch.ones(sum(LENGTHS), dtype=torch.bool)
    has_route[torch.tensor(LENGTHS).cumsum(0) - 1] = False
    return mrr.RoutingTrace(
        topk_indices=random_routes(sum(LENGTHS), 4, 2, 8),
        layer_numbers=range(1, 5),
        num_experts=8,
        replay_mask=has_route,
        token_ids=torch.cat([sample["input_ids"] for sample in samples()]),
        sequence_lengths=LENGTHS,
    )


def train_packed(layout: ParallelSizes, bug: str) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    layout.initialize()
    chunks = build_tiny_gpt(tiny_gpt_config(layout, **FULL), layout, core_attention="small")
    whole = collate_packed(samples(), pad_token_id=0, sequence_multiple=8)
    batch = split_batch(whole, cp_rank=parallel_state.get_context_parallel_rank(), cp_size=layout.cp_size)
    if bug == "rows not split like the tokens":
        start = parallel_state.get_context_parallel_rank() * batch["input_ids"].shape[1]
        batch["routing_rows"] = whole["routing_rows"][:, start : start + batch["input_ids"].shape[1]]
    bounds = whole["cu_seqlens_padded"]
    longest = int(bounds.diff().max())
    microbatch = {key: values for key, values in batch.items() if not key.startswith("cu_seqlens")} | {
        "tokens": batch["input_ids"],
        "labels": batch["labels"].clamp(min=0),
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
        ),
    }
    trace = the_trace()

    def queue(microbatch: dict[str, Any], model: Any) -> None:
        rows = microbatch["routing_rows"]
        # collate_packed fills what it pads with row -1, and every token of these samples has a row.
        session.microbatch(rows, model, token_ids=microbatch["tokens"], padding=rows < 0)

    with watched(chunks) as seen, mrr.replay(chunks, trace, verify=True) as session:
        losses = run_schedule(chunks, layout, [microbatch], before_forward=queue)
    rows = batch["routing_rows"].reshape(-1)
    if layout.sequence_parallel:
        rows = rows.chunk(layout.tp_size)[parallel_state.get_tensor_model_parallel_rank()]
    replayed = (rows >= 0) & trace.replay_mask[rows.clamp(min=0)]
    wrong = sum(
        int((routing_map[replayed] != as_map(trace.layer(router.layer_number)[rows[replayed]], 8)).sum())
        for router in moe_routers(chunks)
        for phase in seen.values()
        for routing_map in phase[router.layer_number]
    )
    report = session.report
    counts = (report.rows_replayed, report.rows_live, report.rows_padding)
    return {"losses": losses, "gradients": gradients(chunks), "wrong": wrong, "counts": counts}


@pytest.mark.parametrize(
    "layout",
    [ParallelSizes(cp_size=2), ParallelSizes(cp_size=2, tp_size=2), ParallelSizes(tp_size=2, ep_size=2)],
    ids=["cp2", "cp2-tp2", "tp2-ep2"],
)
def test_packed_sequences_train_alike_with_replay_on(layout, workers_1, request):
    (expected,) = workers_1.run(train_packed, ParallelSizes(), "")
    assert expected["wrong"] == 0
    assert expected["counts"] == (27, 3, 10)  # 30 tokens, the last of 3 samples live, padded to 8 + 16 + 16
    workers: GlooWorkers = request.getfixturevalue(f"workers_{layout.world_size}")
    ranks = workers.run(train_packed, layout, "")
    assert [rank["wrong"] for rank in ranks] == [0] * len(ranks)
    splits = layout.cp_size * layout.tp_size
    assert [sum(counts) for counts in zip(*(rank["counts"] for rank in ranks))] == [
        count * len(ranks) // splits for count in expected["counts"]
    ]
    torch.testing.assert_close(ranks[-1]["losses"], expected["losses"], rtol=0, atol=1e-5)
    merged = merge_by_name([rank["gradients"] for rank in ranks])
    assert merged.keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(merged[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_rows_that_were_not_split_like_the_tokens_are_caught_by_the_token_ids(workers_2):
    with pytest.raises(mrr.RouterReplayError, match="tokens and routing_rows were not moved by the same code"):
        workers_2.run(train_packed, ParallelSizes(cp_size=2), "rows not split like the tokens")
