"""Segments with several readings, with a known length, or in another layout than the stage computes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, RouterReplayError
from megatron_router_replay.mcore.batches.inputs import ForwardInputs
from megatron_router_replay.mcore.batches.lookup import RowLookup
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
    # Sample 1 before padding; or sample 2, with another token after it, after padding.
    with pytest.raises(RouterReplayError, match=r"MRR206: .* may be padding"):
        rows_replayed([[2, 2, 1], [2, 2, 1, 2], [2]], [2, 2, 1, 2, 2], padding_token_ids=[2])
    # Of a run of one token, all or a part may be padding.
    with pytest.raises(RouterReplayError, match=r"MRR206: .* tokens before sample 0 may be padding"):
        rows_replayed([[0, 0, 5], [0, 5]], [0, 0, 5], padding_token_ids=[0])


def test_a_token_may_be_appended_after_padding_on_the_left() -> None:
    assert rows_replayed([[5, 6, 7], [8]], [0, 0, 5, 6, 7, 9], padding_token_ids=[0]) == 3
    # Sample 0 with 1 appended, or sample 1, after padding.
    with pytest.raises(RouterReplayError, match=r"MRR206: .* tokens before sample 0 may be padding"):
        rows_replayed([[0, 0], [1]], [0, 0, 0, 0, 0, 1], padding_token_ids=[0])


def test_padding_that_is_not_declared_raises_with_the_argument_and_is_exact_with_it() -> None:
    samples = [[5, 6, 7, 8], [5, 6, 9]]
    for row, token, rows in (([5, 6, 7, 8, 0, 0], 0, 4), ([2, 2, 5, 6, 9], 2, 3), ([5, 6, 0, 0, 0], 0, 2)):
        with pytest.raises(RouterReplayError, match=rf"MRR207: .* padding_token_ids=\[{token}\]"):
            rows_replayed(samples, row)
        assert rows_replayed(samples, row, padding_token_ids=[token]) == rows


def test_padding_alone_is_padding_whatever_samples_there_are() -> None:
    chunk = Chunk()
    with mrr.replay(chunk, trace_of([[0], [0, 0, 5], [5]]), min_agreement=0, padding_token_ids=[0]) as session:
        chunk(torch.tensor([[0, 0, 0], [5, 0, 0]]))
    assert (session.report.rows_replayed, session.report.rows_padding) == (1, 5)


def later_stage(hidden: tuple[int, int], cp: Any = None) -> Any:
    """A stage with hidden states [s, b]."""
    return SimpleNamespace(
        pre_process=False,
        decoder=SimpleNamespace(input_tensor=torch.zeros(*hidden, 8)),
        config=SimpleNamespace(sequence_parallel=False),
        pg_collection=SimpleNamespace(cp=cp),
    )


def test_ids_of_other_sequences_than_a_later_stage_computes_raise() -> None:
    stage, trace = later_stage((5, 1)), trace_of([[5, 6, 7], [5, 8]])

    def rows(cu_seqlens: list[int], padding: list[int] | None = None, raw: Any = ([5, 6, 7], [5, 8, 0])) -> Any:
        lookup = RowLookup(trace, padding_token_ids=padding, cp_partition_mode=None)
        packed = SimpleNamespace(cu_seqlens_q=torch.tensor(cu_seqlens))
        inputs = ForwardInputs(input_ids=torch.tensor(raw), packed_seq_params=packed)
        return lookup.locate(stage, inputs, "here").rows.tolist()

    # Packed sequences are as long as cu_seqlens say, so what follows in the raw ids is padding, declared or not.
    assert rows([0, 3, 5]) == rows([0, 3, 5], [0]) == [[0, 1, 2, 3, 4]]
    longer = [[5, 6, 7, 0, 0], [5, 8, 0, 0, 0]]
    assert rows([0, 3, 5], raw=longer) == [[0, 1, 2, 3, 4]], "two tokens of padding that nobody declared"
    assert rows([0, 3, 5], [0], raw=([0, 5, 6, 7], [0, 0, 5, 8])) == [[0, 1, 2, 3, 4]], "padded on the left"
    assert rows([0, 3, 5], [0], raw=([5, 6, 7, 9], [5, 8, 0, 0])) == [[0, 1, 2, 3, 4]], "cut before an appended token"
    assert rows([0, 2, 4], [0]) == [[0, 1, 3, 4, -1]], "the first sequence was cut before its last token"
    with pytest.raises(LayoutError, match=r"MRR201: here: .* input_ids of 2 sequences and computes 1"):
        rows([0, 5])


def test_a_token_appended_to_a_sample_is_routed_live_on_a_later_stage_too() -> None:
    """Its row is -1, as that of padding, so only the mask of padding tells them apart."""
    lookup = RowLookup(trace_of([[5, 6, 7], [5, 8]]), padding_token_ids=[0], cp_partition_mode=None)

    def padding(raw: Any, hidden: tuple[int, int], **inputs: Any) -> Any:
        found = lookup.locate(later_stage(hidden), ForwardInputs(input_ids=torch.tensor(raw), **inputs), "here")
        return None if found.padding is None else found.padding.int().tolist()

    packed = {"packed_seq_params": SimpleNamespace(cu_seqlens_q=torch.tensor([0, 4, 7]))}
    raw = [[5, 6, 7, 9], [5, 8, 0, 0]]
    assert padding(raw, (9, 1), **packed) == [[0, 0, 0, 0, 0, 0, 1, 1, 1]]
    raw = [[0, 5, 6, 7, 9], [0, 0, 5, 8, 9]]
    assert padding(raw, (9, 1), **packed) == [[0, 0, 0, 0, 0, 0, 0, 1, 1]], "packing took padding on the left away"
    packed = {"packed_seq_params": SimpleNamespace(cu_seqlens_q=torch.tensor([0, 3, 6]))}
    assert padding(raw, (6, 1), **packed) is None, "the first sequence was cut before its appended token"
    lengths = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 3, 5]), cu_seqlens_q_padded=torch.tensor([0, 4, 8]))
    assert padding(raw, (8, 1), packed_seq_params=lengths) == [[0, 0, 0, 1, 0, 0, 1, 1]], (
        "lengths without padding decide"
    )


def test_rows_of_a_batch_whose_padding_on_the_left_was_removed_begin_at_their_first_position() -> None:
    """As SkyRL's `remove_left_padding` lays them out, where a later stage gets the ids as they were before."""
    lookup = RowLookup(trace_of([[5, 6, 7], [5, 8]]), padding_token_ids=[0], cp_partition_mode=None)
    ids = torch.tensor([[0, 0, 5, 6, 7], [0, 0, 0, 5, 8]])
    found = lookup.locate(later_stage((4, 2)), ForwardInputs(input_ids=ids), "here")
    assert found.rows.tolist() == [[0, 1, 2, -1], [3, 4, -1, -1]]
    assert found.padding is not None
    assert found.padding.int().tolist() == [[0, 0, 0, 1], [0, 0, 1, 1]]


def test_rows_that_context_parallelism_has_split_are_where_they_were_in_the_raw_ids() -> None:
    """A later stage gets whole rows, padded on the left, and computes its part of each."""
    trace: Any = trace_of([[5, 6, 7], [5, 8]])
    found: list[Any] = []
    for rank in range(2):
        group = SimpleNamespace(size=lambda: 2, rank=lambda rank=rank: rank)
        lookup = RowLookup(trace, padding_token_ids=[0], cp_partition_mode="contiguous")
        ids = torch.tensor([[0, 0, 0, 5, 6, 7, 9, 0], [5, 8, 0, 0, 0, 0, 0, 0]])
        found.append(lookup.locate(later_stage((4, 2), group), ForwardInputs(input_ids=ids), "here"))
    rows, padding = (torch.cat([getattr(each, name) for each in found], dim=1) for name in ("rows", "padding"))
    assert rows.tolist() == [[-1, -1, -1, 0, 1, 2, -1, -1], [3, 4, -1, -1, -1, -1, -1, -1]]
    assert padding.int().tolist() == [[1, 1, 1, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 1, 1, 1]], "9 was appended"
