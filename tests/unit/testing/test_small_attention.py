from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from megatron_router_replay.testing.attention import SmallAttention, row_positions

_ONE_RANK = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


def small_attention(**fields):
    config = {"attention_dropout": 0.0, "window_size": None, "softmax_type": "vanilla", "kv_channels": 8} | fields
    groups = SimpleNamespace(cp=_ONE_RANK)
    return SmallAttention(SimpleNamespace(**config), 1, None, "self", pg_collection=groups)


def packed(starts):
    return SimpleNamespace(cu_seqlens_q=torch.tensor(starts, dtype=torch.int32), cu_seqlens_q_padded=None)


def test_each_rank_holds_one_chunk_of_each_sequence_and_its_mirror():
    assert row_positions(3, cp_rank=0, cp_size=1).tolist() == [[0, 0, 0], [0, 1, 2]]
    assert row_positions(8, cp_rank=0, cp_size=2)[1].tolist() == [0, 1, 6, 7]
    assert row_positions(8, cp_rank=1, cp_size=2)[1].tolist() == [2, 3, 4, 5]
    rows = row_positions(12, cp_rank=1, cp_size=2, cu_seqlens=torch.tensor([0, 4, 12]))
    assert rows.tolist() == [[0, 0, 1, 1, 1, 1], [1, 2, 2, 3, 4, 5]]


def test_a_sequence_that_cannot_be_split_raises():
    with pytest.raises(ValueError, match="sequence 1 has 6 tokens"):
        row_positions(10, cp_rank=0, cp_size=2, cu_seqlens=torch.tensor([0, 4, 10]))
    with pytest.raises(ValueError, match="12 rows"):
        row_positions(12, cp_rank=0, cp_size=1, cu_seqlens=torch.tensor([0, 4, 10]))


def test_attention_equals_torch_on_a_causal_mask_with_grouped_queries():
    query, key, value = torch.randn(5, 2, 4, 8), torch.randn(5, 2, 2, 8), torch.randn(5, 2, 2, 8)
    expected = scaled_dot_product_attention(
        query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), is_causal=True, enable_gqa=True
    )
    got = small_attention()(query, key, value, None)
    torch.testing.assert_close(got.view(5, 2, 4, 8), expected.permute(2, 0, 1, 3))


def test_packed_sequences_do_not_see_each_other():
    query, key, value = (torch.randn(7, 2, 8) for _ in range(3))
    together = small_attention()(query, key, value, None, packed_seq_params=packed([0, 3, 7]))
    for start, end in ((0, 3), (3, 7)):
        rows = slice(start, end)
        alone = small_attention()(query[rows, None], key[rows, None], value[rows, None], None)
        torch.testing.assert_close(together[rows], alone.squeeze(1))


@pytest.mark.parametrize("field", [{"attention_dropout": 0.1}, {"window_size": (4, 0)}, {"softmax_type": "learnable"}])
def test_what_it_does_not_do_raises(field):
    with pytest.raises(ValueError, match="core_attention='local'"):
        small_attention(**field)
    query = torch.randn(2, 1, 1, 8)
    with pytest.raises(ValueError, match="takes no attention_mask"):
        small_attention()(query, query, query, torch.ones(2, 2))
