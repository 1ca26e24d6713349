"""A recording has the samples of its forwards, so it is replayed however batches are cut."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, RouterReplayError
from tests.unit.mcore.tiny_chunk import Chunk, as_map, disturb, watched

A, B, C = [5, 6, 7, 8], [5, 6, 9], [4, 4, 1, 2, 3]
LAYERS = (1, 2, 3)


class Masked(Chunk):
    def forward(self, input_ids: Tensor, padding_mask: Any = None, packed_seq_params: Any = None) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids)


def packed(*bounds: int) -> SimpleNamespace:
    return SimpleNamespace(cu_seqlens_q=torch.tensor(bounds))


def routes_seen(seen: Any, forward: int, positions: list[tuple[int, int]], num_rows: int) -> list[Tensor]:
    """The routing maps of (row, position) of a [b, s] forward, whose routers see s-major; one tensor a layer."""
    at = torch.tensor([position * num_rows + row for row, position in positions])
    return [seen[forward, layer][0][at] for layer in LAYERS]


def test_samples_are_cut_and_replayed_by_their_tokens_in_other_batches() -> None:
    chunk = Masked()
    with watched(chunk) as seen, mrr.record(chunk) as recording:
        mask = torch.tensor([[False] * 4 + [True], [True] * 2 + [False] * 3])
        chunk(torch.tensor([[*A, 0], [0, 0, *B]]), mask)
    trace = recording.trace()
    assert trace.token_ids.tolist() == A + B
    assert trace.sequence_lengths == (4, 3)
    assert trace.replay_mask.all()
    expected = routes_seen(seen, 0, [*((0, p) for p in range(4)), *((1, p) for p in range(2, 5))], 2)
    for layer, maps in zip(LAYERS, expected):
        assert torch.equal(as_map(trace.layer(layer)), maps)
    assert (recording.report.tokens, recording.report.rows_padding) == (10, 3)
    disturb(chunk)
    with watched(chunk) as seen, mrr.replay(chunk, trace, min_agreement=0):
        chunk(torch.tensor([[*B, *A]]), packed_seq_params=packed(0, 3, 7))
    replayed = routes_seen(seen, 0, [(0, p) for p in (3, 4, 5, 6, 0, 1, 2)], 1)
    assert all(torch.equal(one, other) for one, other in zip(replayed, expected))


def test_forwards_follow_one_another_and_one_that_failed_is_not_recorded() -> None:
    chunk = Masked()
    with mrr.record(chunk, padding_token_ids=[]) as recording:  # one sample begins with a token twice
        chunk(torch.tensor([A]))
        chunk.fail_at = 1
        with pytest.raises(ArithmeticError):
            chunk(torch.tensor([B]))
        chunk(torch.tensor([C]))
        with recording.paused():
            chunk(torch.tensor([[1, 2, 3]]))
        chunk(torch.tensor([B, B]))
    trace = recording.trace()
    assert trace.sequence_lengths == (4, 5, 3, 3)
    assert trace.token_ids.tolist() == [*A, *C, *B, *B]


def test_packed_sequences_of_known_and_of_declared_padding() -> None:
    tokens = torch.tensor([[*B, 0, *A, 0, 0]])
    padded, real = torch.tensor([0, 4, 8]), torch.tensor([0, 3, 7])
    known = SimpleNamespace(cu_seqlens_q=real, cu_seqlens_q_padded=padded)
    for parameters, options in ((known, {}), (SimpleNamespace(cu_seqlens_q=padded), {"padding_token_ids": [0]})):
        chunk = Masked()
        with mrr.record(chunk, **options) as recording:
            chunk(tokens, packed_seq_params=parameters)
        assert recording.trace().sequence_lengths == (3, 4)
        assert recording.trace().token_ids.tolist() == [*B, *A]


def test_the_rest_of_a_packed_row_is_padding_whatever_the_mask_says_of_it() -> None:
    chunk, mask = Masked(), torch.tensor([[False] * 4 + [True] + [False] * 2])
    with mrr.record(chunk) as recording:
        chunk(torch.tensor([[*A, 0, 3, 3]]), mask, packed(0, 4))
    assert recording.trace().token_ids.tolist() == A
    assert recording.report.rows_padding == 3


@pytest.mark.parametrize("rows", [[[*A, 0, 0]], [[0, 0, *A]], [[*B, 0, 0], C], [B, A[:3]]])
def test_a_batch_that_may_be_padded_raises_until_it_is_said(rows: list[list[int]]) -> None:
    """Several rows, also where none shows padding: the first forward asks, not a later one."""
    chunk, tokens = Masked(), torch.tensor(rows)
    with pytest.raises(LayoutError, match=r"MRR207: .*micro-batch 0: .*padding_token_ids"), mrr.record(chunk):
        chunk(tokens)
    with mrr.record(chunk, padding_token_ids=[0]) as recording:
        chunk(tokens)
    assert recording.trace().sequence_lengths == tuple(len([token for token in row if token]) for row in rows)
    with mrr.record(chunk, padding_token_ids=[]) as recording:
        chunk(tokens)
    assert recording.trace().sequence_lengths == tuple(map(len, rows))


def test_rows_with_a_mask_and_a_single_row_need_no_word() -> None:
    chunk = Masked()
    with mrr.record(chunk) as recording:
        chunk(torch.tensor([B, A[:3]]), torch.zeros(2, 3, dtype=torch.bool))
        chunk(torch.tensor([A]))
    assert recording.trace().sequence_lengths == (3, 3, 4)


def test_a_recording_keeps_tokens_that_the_trainer_overwrites() -> None:
    chunk, buffer = Masked(), torch.tensor([A])
    with mrr.record(chunk) as recording:
        chunk(buffer)
        buffer.zero_()
    assert recording.trace().token_ids.tolist() == A


@pytest.mark.parametrize(
    ("tokens", "bounds", "lengths"),
    [
        ([5], None, (1,)),
        ([5, 6, 6], (0, 2, 3), (2, 1)),  # the last sequence is one token, and the one before it ends with it
        ([4, 4, 1, 2, 2, 3], (0, 4, 6), (4, 2)),  # packed sequences have no padding in front
        ([4, 1, 1, 2], None, (4,)),
    ],
    ids=["one token", "packed, one token", "packed, equal tokens in front", "equal tokens inside"],
)
def test_sequences_that_show_no_padding_need_no_word(tokens: list[int], bounds: Any, lengths: Any) -> None:
    chunk = Masked()
    with mrr.record(chunk) as recording:
        chunk(torch.tensor([tokens]), packed_seq_params=bounds and packed(*bounds))
    assert recording.trace().sequence_lengths == lengths
    assert recording.trace().token_ids.tolist() == tokens


@pytest.mark.parametrize("tokens", [[0, 0], [5, 0, 0], [0, 0, 5]])
def test_two_equal_tokens_at_an_end_may_be_padding(tokens: list[int]) -> None:
    chunk = Masked()
    with pytest.raises(LayoutError, match=r"MRR207: .*begin or end with several equal tokens"), mrr.record(chunk):
        chunk(torch.tensor([tokens]))


def test_packed_sequences_that_end_in_equal_tokens_may_be_padded() -> None:
    chunk = Masked()
    with pytest.raises(LayoutError, match=r"MRR207: .*begin or end with several equal tokens"), mrr.record(chunk):
        chunk(torch.tensor([[*B, *A, 0, 0]]), packed_seq_params=packed(0, 3, 9))


class Embedded(Chunk):
    """A part of a model, which gets hidden states [s, b, h]."""

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.zeros(hidden.shape[1], hidden.shape[0], dtype=torch.int64))


class LaterStage(Masked):
    pre_process = False
    decoder = SimpleNamespace(input_tensor=torch.zeros(7, 1, 8))


@pytest.mark.parametrize(
    ("chunk", "inputs", "match"),
    [
        (Embedded, torch.zeros(4, 1, 8), "MRR424: rank 0, chunk 0, micro-batch 0: Embedded got no input_ids"),
        (
            LaterStage,
            torch.tensor([B, A[:3]]),
            "MRR201: rank 0, chunk 0, micro-batch 0: .*of 2 sequences and computes 1",
        ),
    ],
)
def test_a_stage_whose_tokens_are_not_known_is_not_recorded(chunk: Any, inputs: Tensor, match: str) -> None:
    model = chunk()
    with pytest.raises(RouterReplayError, match=match), mrr.record(model, padding_token_ids=[]):
        model(inputs)
