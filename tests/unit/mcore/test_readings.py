"""Segments with several readings, with a known length, or in another layout than the stage computes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, RouterReplayError
from megatron_router_replay.mcore.batches.follow import Follower
from megatron_router_replay.mcore.batches.index import PrefixIndex, index_of
from megatron_router_replay.mcore.batches.inputs import ForwardInputs
from megatron_router_replay.mcore.batches.locate import locate
from megatron_router_replay.mcore.batches.segments import Segments
from tests.support.soft_gpu import SoftGpu
from tests.support.workers import GlooWorkers
from tests.unit.mcore.tiny_chunk import EXPERTS, Chunk, random_routes


def trace_of(samples: list[list[int]]) -> mrr.RoutingTrace:
    """Samples with the same routes in all rows."""
    tokens = [token for sample in samples for token in sample]
    return mrr.RoutingTrace(
        topk_indices=random_routes(1).expand(len(tokens), -1, -1),
        layer_numbers=(1, 2, 3),
        num_experts=EXPERTS,
        token_ids=tokens,
        sequence_lengths=[len(sample) for sample in samples],
    )


def rows_replayed(samples: list[list[int]], row: list[int], **options: Any) -> int:
    """Replay samples in a forward of one row."""
    chunk = Chunk()
    with mrr.replay(chunk, trace_of(samples), min_agreement=0, **options) as session:
        chunk(torch.tensor([row]))
    return int(session.report.rows_replayed)


def test_a_beginning_that_may_be_declared_padding_is_no_silent_choice() -> None:
    # 1 and 2 may be padding before sample 1, or the beginning of sample 0; 1 alone is that of sample 0.
    with pytest.raises(RouterReplayError, match=r"MRR206: .* tokens before sample 0 may be padding"):
        rows_replayed([[1, 2, 3], [3]], [1, 2, 3], padding_token_ids=[1, 2])
    assert rows_replayed([[1, 2, 3], [3]], [1, 2, 3], padding_token_ids=[1]) == 3
    # 3 may be padding, and so may the three tokens that sample 1 begins with.
    with pytest.raises(RouterReplayError, match=r"MRR206: .* may be padding"):
        rows_replayed([[0, 1], [3, 1, 3, 0, 2]], [2, 3, 3, 1, 3, 0, 2], padding_token_ids=[1, 2, 3])
    # Sample 0 or 1 ends where padding begins; or sample 2, with another token after it, begins after padding.
    with pytest.raises(RouterReplayError, match=r"MRR206: .* may be padding"):
        rows_replayed([[2, 2, 1], [2, 2, 1, 2], [2]], [2, 2, 1, 2, 2], padding_token_ids=[2])
    # Of a run of one token, all or a part may be padding.
    with pytest.raises(RouterReplayError, match=r"MRR206: .* tokens before sample 0 may be padding"):
        rows_replayed([[0, 0, 5], [0, 5]], [0, 0, 5], padding_token_ids=[0])


def test_a_token_that_may_be_padding_is_a_samples_where_no_forward_shows_padding() -> None:
    assert rows_replayed([[0, 5, 6], [5, 6]], [0, 5, 6]) == 3
    with pytest.raises(RouterReplayError, match="token 0 may be padding or a part of a sample"):
        rows_replayed([[5, 6, 7], [5, 6, 7, 0, 9]], [5, 6, 7, 0])


def test_a_token_may_be_appended_after_padding_on_the_left() -> None:
    assert rows_replayed([[5, 6, 7], [8]], [0, 0, 5, 6, 7, 9]) == 3
    # Sample 0 with 1 appended, or sample 1, after padding.
    with pytest.raises(RouterReplayError, match=r"MRR206: .* tokens before sample 0 may be padding"):
        rows_replayed([[0, 0], [1]], [0, 0, 0, 0, 0, 1])
    # Sample 0 with 1 appended and 2 as padding, or sample 1 after padding.
    with pytest.raises(RouterReplayError, match=r"MRR207: .* token 2 stands where a sequence leaves its sample"):
        rows_replayed([[0], [1, 2, 2]], [0, 1, 2, 2])


def test_a_token_that_is_padding_or_appended_in_one_row_is_no_silent_choice_in_another() -> None:
    def run(*rows: list[int]) -> None:
        with mrr.replay(chunk := Chunk(), trace_of([[2, 3], [4, 5], [5]]), min_agreement=0):
            chunk(torch.tensor(rows))

    run([4, 5], [2, 3])  # sample 1: no row shows padding
    with pytest.raises(RouterReplayError, match=r"MRR207: .* token 4 may be padding or a part of a sample"):
        run([5, 4], [4, 5])


def counts_on_a_gpu() -> list[int]:
    """Locate a row of which a padding mask leaves two of four tokens."""
    tokens = torch.tensor([5, 6, 7, 8])
    with SoftGpu():
        gpu = torch.device("cuda")
        segments = Segments.of((1, 4), device=gpu).bound(torch.tensor([False, False, True, True]).to(gpu))
        counts: list[int] = locate(PrefixIndex(tokens, [4]).to(gpu), tokens.to(gpu), segments).count.tolist()
    return counts


def test_on_a_gpu_tokens_after_a_known_length_have_no_row() -> None:
    # Every position is looked up there, also those that continue the sample after the length.
    with GlooWorkers(1) as workers:
        assert workers.run(counts_on_a_gpu) == [[2, 0]]


def test_ids_of_other_sequences_than_a_later_stage_computes_raise() -> None:
    decoder = SimpleNamespace(input_tensor=torch.zeros(5, 1, 8))
    config, groups = SimpleNamespace(sequence_parallel=False), SimpleNamespace(cp=None)
    stage: Any = SimpleNamespace(pre_process=False, decoder=decoder, config=config, pg_collection=groups)
    trace = trace_of([[5, 6, 7], [5, 8]])
    follower = Follower(trace, padding_token_ids=[0], cp_partition_mode=None, check=lambda *_: None)

    def rows(cu_seqlens: list[int]) -> Any:
        packed = SimpleNamespace(cu_seqlens_q=torch.tensor(cu_seqlens))
        inputs = ForwardInputs(input_ids=torch.tensor([[5, 6, 7], [5, 8, 0]]), packed_seq_params=packed)
        return follower.find(stage, inputs, index_of(trace), "here").rows.tolist()

    assert rows([0, 3, 5]) == [[0, 1, 2, 3, 4]]
    with pytest.raises(LayoutError, match=r"MRR201: here: .* input_ids of 2 sequences and computes 1"):
        rows([0, 5])
