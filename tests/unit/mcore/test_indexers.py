"""Sparse attention under a freeze: Megatron-Core's own DSAttention is refused by name, or left live."""

from typing import Any

import pytest
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import dsa
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import nn

import megatron_router_replay as mrr
from megatron_router_replay.errors import UnsupportedRouterError
from megatron_router_replay.testing import ParallelSizes
from tests.unit.mcore.tiny_chunk import Chunk

pytestmark = pytest.mark.version


class Linear(nn.Linear):
    def __init__(self, input_size: int, output_size: int, **unused: Any) -> None:
        super().__init__(input_size, output_size, bias=False)


class Norm(nn.LayerNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)


@pytest.fixture
def chunk(megatron: None) -> Chunk:
    """Return a model whose second layer also has sparse attention."""
    ParallelSizes().initialize()
    config = MLATransformerConfig(
        num_layers=3, hidden_size=16, num_attention_heads=2, multi_latent_attention=True, q_lora_rank=None,
        qk_pos_emb_head_dim=4, rope_type="rope", apply_rope_fusion=False, dsa_indexer_n_heads=2, dsa_indexer_head_dim=8,
        dsa_indexer_topk=3, dsa_indexer_loss_coeff=0.0,
    )  # fmt: skip
    linears = dict.fromkeys(("linear_wq_b", "linear_wk", "linear_weights_proj"), Linear)
    indexer = ModuleSpec(module=dsa.DSAIndexer, submodules=dsa.DSAIndexerSubmodules(k_norm=Norm, **linears))
    chunk = Chunk()
    chunk.layers[1].attention = dsa.DSAttention(
        config, dsa.DSAttentionSubmodules(indexer=indexer), 2, AttnMaskType.causal, "self", k_channels=8
    )
    return chunk


def test_a_freeze_names_the_layers_with_sparse_attention_once(chunk):
    with pytest.raises(
        UnsupportedRouterError, match=r"MRR401: .* in layer 2 \(layers\.1\.attention\): .*indexers=False"
    ):
        mrr.freeze_recompute(chunk)
    assert mrr.explain(chunk).indexers == ("layer 2 (layers.1.attention)",)
    assert str(mrr.explain(chunk)).splitlines()[-1].startswith("sparse attention in layer 2 (layers.1.attention): ")


def test_experts_alone_can_be_frozen_and_a_replay_asks_nothing_of_sparse_attention(chunk):
    mrr.freeze_recompute(chunk, indexers=False).close()
    mrr.record(chunk).close(check=False)
    mrr.freeze_recompute(Chunk()).close()  # a model without any


def test_an_indexer_of_an_unknown_attention_is_refused_too(chunk):
    chunk.layers[2].choice, chunk.layers[1].attention = chunk.layers[1].attention.indexer, None
    with pytest.raises(UnsupportedRouterError, match=r"MRR401: .*layers\.2\.choice"):
        mrr.freeze_recompute(chunk)
