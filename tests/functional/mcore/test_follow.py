"""`with mrr.replay(chunks, trace):` and nothing else, on every layout: each router gets the rows of its tokens."""

import re
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, ReplayStateError
from megatron_router_replay.layout.split import split_context_parallel
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import DRAWN, FULL, Case, random_routes, same, watched, wrong_replays
from tests.support.gradients import gradients
from tests.support.packing import pack_sequences, pad_sequences
from tests.support.schedule import masked_mean_loss, run_schedule
from tests.support.tiny_gpt import build_tiny_gpt, tiny_gpt_config

CONTIGUOUS = "packed, a contiguous stream"
CUT = 12
"""Tokens of the longest sample that a batch has; the rest is cut off on the right."""


def samples() -> list[Tensor]:
    """Six samples: two pairs share their first four tokens, one begins with the padding token, one has two tokens."""
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randint(1, 320, (length,), generator=generator) for length in (9, 7, 12, 2, 15, 10)]
    drawn[1][:4], drawn[5][:4] = drawn[0][:4], drawn[2][:4]
    drawn[2][5] = 0  # the padding token inside of one
    return drawn


def the_trace() -> mrr.RoutingTrace:
    lengths = [len(sample) for sample in samples()]
    routes = random_routes(sum(lengths), 4).split([*lengths])
    # Equal prefixes have equal routes, as an engine's have: a batch that is cut inside of one takes the first.
    routes[1][:4], routes[5][:4] = routes[0][:4], routes[2][:4]
    sizes = {"num_experts": 8, "layer_numbers": range(1, 5)}
    return mrr.RoutingTrace.from_samples(samples(), list(routes), **sizes, last_token="unrouted")


ORDER, ANY_LENGTH = (0, 1, 2, 3, 4, 5), 99


def rows_of(number: int, order: Sequence[int] = ORDER, longest: int = ANY_LENGTH) -> Tensor:
    """The trace rows of a sample, by counting: of a trace with samples in this order, each cut to the longest length."""
    lengths = [min(len(samples()[each]), longest) for each in order]
    place = order.index(number)
    return torch.arange(lengths[place]) + sum(lengths[:place])


def batch(numbers: list[int], kind: str, layout: ParallelSizes, cp_rank: int, **of_trace: Any) -> dict[str, Any]:
    """One micro-batch, shuffled, cut and padded; `rows` are for the oracle alone."""
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens, rows = [samples()[n][:CUT] for n in numbers], [rows_of(n, **of_trace)[:CUT] for n in numbers]
    split = partial(split_context_parallel, cp_rank=cp_rank, cp_size=layout.cp_size)
    if kind in ("right", "left"):
        pad = partial(pad_sequences, length=16, side=kind)
        ids, at, packed = pad(tokens, fill=0), pad(rows, fill=-1), None
        position_ids = torch.arange(16).expand(len(numbers), -1)
    else:
        pack = partial(pack_sequences, multiple=8, total=48)
        (ids, real, bounds), at = pack(tokens, fill=0), pack(rows, fill=-1)[0]
        known = {"cu_seqlens_q": real, "cu_seqlens_q_padded": bounds}
        lengths = known if kind == "packed, lengths known" else {"cu_seqlens_q": bounds}
        longest = int(bounds.diff().max())
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest, **lengths
        )
        split = partial(split, cu_seqlens_padded=bounds)
        if kind == CONTIGUOUS:  # its attention makes no sense, but the rows that each rank has are what is asked
            split = lambda values: values.chunk(layout.cp_size, dim=1)[cp_rank]  # noqa: E731
        position_ids = torch.arange(48).view(1, -1)
    ids, at, position_ids = split(ids), split(at), split(position_ids)
    return {
        "tokens": ids,
        "rows": at,
        "position_ids": position_ids.contiguous(),
        "labels": ids,
        "loss_mask": (at >= 0).float(),
        "packed_seq_params": packed,
        "raw": pad_sequences(tokens, fill=0, length=16),
    }


def follow(layout: ParallelSizes, kind: str, raw_stages: bool) -> int:
    """Run a schedule with the four lines, and by hand; count wrong decisions of all forwards and recomputes."""
    from megatron.core import parallel_state

    layout.initialize()
    chunks = build_tiny_gpt(tiny_gpt_config(layout, **FULL), layout, small_attention=True)
    cp_rank = parallel_state.get_context_parallel_rank()
    # Shuffled, a sample twice, others left out; each rank of data parallelism has its own.
    groups = [[4, 0, 2], [1, 3, 5], [2, 2, 0], [3, 1, 4]]
    shift = parallel_state.get_data_parallel_rank()
    microbatches = [batch(groups[(i + shift) % 4], kind, layout, cp_rank) for i in range(4)]
    trace, case = the_trace(), Case(layout=layout)

    def forward_step(iterator: Any, model: Any) -> Any:
        microbatch = next(iterator)
        is_first = model.pre_process if hasattr(model, "pre_process") else model.module.pre_process
        ids = microbatch["tokens"] if is_first or not raw_stages else microbatch["raw"]
        output = model(
            ids,
            microbatch["position_ids"],
            None,
            labels=microbatch["labels"],
            packed_seq_params=microbatch["packed_seq_params"],
        )
        return output, partial(masked_mean_loss, microbatch["loss_mask"])

    def run(**options: Any) -> Any:
        return run_schedule(chunks, layout, microbatches, **options), gradients(chunks)

    partition = {"cp_partition_mode": "contiguous"} if kind == CONTIGUOUS else {}
    options = {"padding_token_ids": [0], **DRAWN, **partition}
    with watched(chunks) as seen, mrr.replay(chunks, trace, verify=True, **options) as session:
        followed = run(forward_step=forward_step)
    wrong = wrong_replays(case, seen, trace, microbatches)
    assert seen["recompute"]
    assert session.report.rows_padding > 0

    def queue(microbatch: dict[str, Any], model: Any) -> None:
        rows = microbatch["rows"]
        session.microbatch(rows, model, padding=rows < 0)

    with mrr.replay(chunks, trace, **DRAWN) as session:
        by_hand = run(before_forward=queue)
    assert same(followed, by_hand), "rows by hand gave other losses or gradients"
    return wrong


VERSION = pytest.mark.version
"""What a forward gets differs between versions, what a layout does to it does not."""
CASES = [
    pytest.param({}, "left", False, marks=VERSION),
    pytest.param({}, "packed, lengths known", False, marks=VERSION),
    pytest.param({"tp_size": 2}, "right", False),
    pytest.param({"pp_size": 2}, "left", False),
    pytest.param({"pp_size": 2, "vp_size": 2}, "packed", True),
    pytest.param({"ep_size": 2}, "packed", False),
    pytest.param({"cp_size": 2}, "right", False, marks=VERSION),
    pytest.param({"cp_size": 2}, "packed, lengths known", False, marks=VERSION),
    pytest.param({"cp_size": 2}, CONTIGUOUS, False, marks=VERSION),
    pytest.param({"tp_size": 2, "cp_size": 2}, "packed", False),
    pytest.param({"pp_size": 2, "cp_size": 2}, "packed", True),
]


@pytest.mark.parametrize(("sizes", "kind", "raw_stages"), CASES, ids=str)
def test_every_router_gets_the_rows_of_its_tokens(
    sizes: dict[str, int], kind: str, raw_stages: bool, on_ranks: Any
) -> None:
    """With `raw_stages`, later stages get their tokens as they were before packing."""
    layout = ParallelSizes(**sizes)
    assert on_ranks(layout.world_size, follow, layout, kind, raw_stages) == [0] * layout.world_size


LATER_STAGE: dict[str, Any] = {
    "dummies": lambda first, second: (torch.zeros_like(first), torch.zeros_like(second)),
    "rows of the first micro-batch in another order": lambda first, second: (first.flip(0), second),
    "other tokens in a recording": lambda first, second: (torch.where(first > 0, first % 7 + 1, 0), second),
    "the same": lambda first, second: (first, second),
}
"""What a later stage gets for the ids of two micro-batches; the shape stays."""


def with_ids_on_a_later_stage(name: str) -> str:
    """Replay or record where a later stage gets other ids than the first; return the error of this rank."""
    layout = ParallelSizes(pp_size=2)
    layout.initialize()
    chunks = build_tiny_gpt(tiny_gpt_config(layout, **FULL), layout, small_attention=True)
    microbatches = [batch(group, "right", layout, 0) for group in ([4, 0, 2], [1, 3, 5])]
    for microbatch, ids in zip(microbatches, LATER_STAGE[name](*(each["tokens"] for each in microbatches))):
        microbatch["of a later stage"] = ids

    def forward_step(iterator: Any, model: Any) -> Any:
        microbatch = next(iterator)
        ids = microbatch["tokens" if model.pre_process else "of a later stage"]
        output = model(ids, microbatch["position_ids"], None, labels=microbatch["labels"])
        return output, partial(masked_mean_loss, microbatch["loss_mask"])

    options = {"padding_token_ids": [0]}
    of_replay = {"min_replayed": 0.3, **DRAWN}
    records = "recording" in name
    try:
        with mrr.record(chunks, **options) if records else mrr.replay(chunks, the_trace(), **options, **of_replay):
            run_schedule(chunks, layout, microbatches, forward_step=forward_step)
    except ReplayStateError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", LATER_STAGE)
def test_a_later_stage_with_other_rows_raises_on_all_ranks(name: str, on_ranks: Any) -> None:
    for error in on_ranks(2, with_ids_on_a_later_stage, name):
        message = r"pipeline stage 1 \(rank 1\) found other rows for its micro-batches than stage 0 \(rank 0\)"
        assert bool(re.search(message, error)) == (name != "the same"), error


def foreign_token(microbatch: dict[str, Any], rank: int) -> None:
    """The last chunk of a sequence is another text's: of four chunks, rank 1 has the two in the middle."""
    if rank == 1:
        microbatch["tokens"][0, -1] = 319


def odd_chunks(microbatch: dict[str, Any], rank: int) -> None:
    microbatch |= {name: microbatch[name][:, :7] for name in ("tokens", "position_ids", "labels", "loss_mask")}


def group_that_changes(microbatch: dict[str, Any], rank: int) -> None:
    microbatch["packed_seq_params"] = SimpleNamespace(local_cp_size=2, cp_group=None)


def odd_sequence(microbatch: dict[str, Any], rank: int) -> None:
    microbatch |= batch([4, 0, 2], "packed", ParallelSizes(cp_size=2), rank)
    microbatch["packed_seq_params"].cu_seqlens_q = torch.tensor([0, 18, 32, 48], dtype=torch.int32)


GROUPS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "foreign token on one rank": (
        foreign_token,
        {},
        r"MRR206.*input_ids\[0, 7\] of context-parallel rank 1.*position 11",
    ),
    "odd number of positions": (odd_chunks, {}, r"MRR204.*\[14\] positions"),
    "odd sequence": (odd_sequence, {}, r"MRR204.*\[18, 14, 16\]"),
    "split otherwise": (lambda *_: None, {"cp_partition_mode": "contiguous"}, "MRR206"),
    "group that changes": (group_that_changes, {}, "MRR204.*local_cp_size=2"),
}


def all_ranks_raise(layout: ParallelSizes, name: str) -> str:
    from megatron.core import parallel_state

    layout.initialize()
    change, options, match = GROUPS[name]
    chunks = build_tiny_gpt(tiny_gpt_config(layout), layout, small_attention=True)
    cp_rank = parallel_state.get_context_parallel_rank()
    microbatch = batch([4, 0, 2], "right", layout, cp_rank)
    change(microbatch, cp_rank)
    with pytest.raises(LayoutError, match=match) as error, mrr.replay(chunks, the_trace(), **DRAWN, **options):
        run_schedule(chunks, layout, [microbatch])
    return str(error.value)


@pytest.mark.version
@pytest.mark.parametrize("name", GROUPS)
def test_what_is_wrong_on_a_rank_raises_on_all_ranks_of_the_group(name: str, on_ranks: Any) -> None:
    one, other = on_ranks(2, all_ranks_raise, ParallelSizes(cp_size=2), name)
    assert one.replace(": rank 0", ": rank 1") == other


def record(layout: ParallelSizes, path: str) -> tuple[int, ...]:
    """Record a forward pass padded on the right, and save the whole of it."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    layout.initialize()
    chunks = build_tiny_gpt(tiny_gpt_config(layout), layout, small_attention=True)
    cp_rank, shift = parallel_state.get_context_parallel_rank(), parallel_state.get_data_parallel_rank()
    microbatches = [batch(numbers, "right", layout, cp_rank) for numbers in ([4, 0, 2], [1, 3, 5])]
    microbatches = microbatches if parallel_state.get_data_parallel_world_size() == 1 else [microbatches[shift]]
    with mrr.record(chunks, padding_token_ids=[0]) as recording:
        run_schedule(chunks, layout, microbatches, forward_only=True)
    trace = recording.gather()
    if dist.get_rank() == 0:
        mrr.save_trace(trace, path)
    lengths: tuple[int, ...] = trace.sequence_lengths
    assert trace.replay_mask.all()
    return lengths


def replay_recorded(layout: ParallelSizes, path: str, kind: str) -> list[float]:
    """Replay it with other micro-batches; return the losses of the recorded routes."""
    layout.initialize()
    chunks = build_tiny_gpt(tiny_gpt_config(layout, **FULL), layout, small_attention=True)
    recorded = {"order": [4, 0, 2, 1, 3, 5], "longest": CUT}
    microbatches = [batch(numbers, kind, layout, 0, **recorded) for numbers in ([3, 0, 5], [2, 1, 4])]
    trace = mrr.load_trace(path)
    options = {"padding_token_ids": [0], **DRAWN}
    with watched(chunks) as seen, mrr.replay(chunks, trace, verify=True, **options) as session:
        losses = run_schedule(chunks, layout, microbatches)
    assert session.report.rows_live == 0
    assert wrong_replays(Case(layout=layout), seen, trace, microbatches) == 0
    return [float(loss) for loss in losses]


@pytest.mark.parametrize(
    ("recorded", "replayed", "kind"),
    [
        ({"tp_size": 2, "pp_size": 2}, {"ep_size": 2}, "left"),
        ({"ep_size": 2}, {"tp_size": 2}, "left"),
        pytest.param({"cp_size": 2}, {"pp_size": 2}, "packed", marks=VERSION),
    ],
    ids=str,
)
def test_a_recording_is_replayed_by_other_ranks_in_other_micro_batches(
    recorded: dict[str, int], replayed: dict[str, int], kind: str, on_ranks: Any, tmp_path: Any
) -> None:
    path, of, to = str(tmp_path / "whole.safetensors"), ParallelSizes(**recorded), ParallelSizes(**replayed)
    assert on_ranks(of.world_size, record, of, path) == [(12, 9, 12, 7, 2, 10)] * of.world_size
    losses = on_ranks(to.world_size, replay_recorded, to, path, kind)[-1]
    (of_one_rank,) = on_ranks(1, replay_recorded, ParallelSizes(), path, kind)
    assert len(losses) == 2
    assert losses == pytest.approx(of_one_rank, abs=1e-5)
