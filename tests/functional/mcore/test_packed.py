"""Packed sequences with rows by hand, split over context-parallel ranks and replayed: the same as unsplit."""

from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.layout import number_rows, split_context_parallel
from megatron_router_replay.layout.rows import pack_sequences
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import DRAWN, FULL, Case, random_routes, watched, wrong_replays
from tests.support.gradients import gradients, merge_by_name
from tests.support.schedule import run_schedule
from tests.support.tiny_gpt import build_tiny_gpt, tiny_gpt_config

pytestmark = pytest.mark.version
LENGTHS = (5, 16, 9)


def samples() -> list[torch.Tensor]:
    """Return the tokens of each sample and one more, the label of its last."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(320, (length + 1,), generator=generator) for length in LENGTHS]


def the_trace() -> mrr.RoutingTrace:
    """Random routes for every token but the last of each sample, as engines send them."""
    has_route = torch.ones(sum(LENGTHS), dtype=torch.bool)
    has_route[torch.tensor(LENGTHS).cumsum(0) - 1] = False
    return mrr.RoutingTrace(
        topk_indices=random_routes(sum(LENGTHS), 4),
        layer_numbers=range(1, 5),
        num_experts=8,
        replay_mask=has_route,
        token_ids=torch.cat([sample[:-1] for sample in samples()]),
        sequence_lengths=LENGTHS,
    )


def train_packed(layout: ParallelSizes, rows_are_split: bool = True) -> dict[str, Any]:
    from megatron.core import parallel_state
    from megatron.core.packed_seq_params import PackedSeqParams

    layout.initialize()
    chunks = build_tiny_gpt(tiny_gpt_config(layout, **FULL), layout, small_attention=True)
    fields = {
        "tokens": ([sample[:-1] for sample in samples()], 0),
        "labels": ([sample[1:] for sample in samples()], 0),
        "loss_mask": ([torch.ones(length) for length in LENGTHS], 0),
        "position_ids": ([torch.arange(length) for length in LENGTHS], 0),
        "rows": (number_rows(LENGTHS), -1),
    }
    packed = {name: pack_sequences(values, fill=fill, sequence_multiple=8) for name, (values, fill) in fields.items()}
    bounds = packed["tokens"].cu_seqlens_padded
    cp_rank = parallel_state.get_context_parallel_rank()
    microbatch: dict[str, Any] = {
        name: split_context_parallel(each.values, cp_rank=cp_rank, cp_size=layout.cp_size, cu_seqlens_padded=bounds)
        for name, each in packed.items()
    }
    if not rows_are_split:
        length = microbatch["tokens"].shape[1]
        microbatch["rows"] = packed["rows"].values[:, cp_rank * length : (cp_rank + 1) * length]
    longest = int(bounds.diff().max())
    microbatch["packed_seq_params"] = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    trace = the_trace()

    def queue(microbatch: dict[str, Any], model: Any) -> None:
        rows = microbatch["rows"]
        # Padding has row -1, and every token of these samples has a row.
        session.microbatch(rows, model, token_ids=microbatch["tokens"], padding=rows < 0)

    with watched(chunks) as seen, mrr.replay(chunks, trace, **DRAWN, verify=True) as session:
        losses = run_schedule(chunks, layout, [microbatch], before_forward=queue)
    assert wrong_replays(Case(layout=layout), seen, trace, [microbatch]) == 0
    report = session.report
    counts = (report.rows_replayed, report.rows_live, report.rows_padding)
    return {"losses": losses, "gradients": gradients(chunks), "counts": counts}


@pytest.mark.parametrize(
    "layout",
    [ParallelSizes(cp_size=2), ParallelSizes(cp_size=2, tp_size=2), ParallelSizes(tp_size=2, ep_size=2)],
    ids=["cp2", "cp2-tp2", "tp2-ep2"],
)
def test_packed_sequences_train_alike_with_replay_on(layout, on_ranks):
    (expected,) = on_ranks(1, train_packed, ParallelSizes())
    assert expected["counts"] == (27, 3, 10)  # 30 tokens, the last of 3 samples live, padded to 8 + 16 + 16
    ranks = on_ranks(layout.world_size, train_packed, layout)
    copies = len(ranks) // (layout.cp_size * layout.tp_size)
    summed = [sum(counts) for counts in zip(*(rank["counts"] for rank in ranks))]
    assert summed == [count * copies for count in expected["counts"]]
    torch.testing.assert_close(ranks[-1]["losses"], expected["losses"], rtol=0, atol=1e-5)
    merged = merge_by_name([rank["gradients"] for rank in ranks])
    torch.testing.assert_close(merged, expected["gradients"], rtol=1e-4, atol=1e-5)


def test_rows_that_were_not_split_like_the_tokens_are_caught_by_the_token_ids(on_ranks):
    with pytest.raises(mrr.RouterReplayError, match="tokens and rows were not moved by the same code"):
        on_ranks(2, train_packed, ParallelSizes(cp_size=2), False)
