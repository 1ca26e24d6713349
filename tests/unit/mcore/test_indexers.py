"""Frozen indexers: what a recompute is told, what a tape keeps, and what raises. The attentions are Megatron-Core's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.experimental_attention_variant import dsa
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError, UnsupportedRouterError
from megatron_router_replay.mcore import Tape
from megatron_router_replay.mcore.attention import sparse
from megatron_router_replay.mcore.attention.indexers import find_indexers
from megatron_router_replay.mcore.attention.sparse import decode_positions, encode_positions
from megatron_router_replay.mcore.model.find import walk
from megatron_router_replay.mcore.model.upstream import megatron_version, version_numbers
from megatron_router_replay.testing import ParallelSizes
from tests.support.tiny_dsa import DuplicatedLinear
from tests.unit.mcore.tiny_chunk import Around, bare, non_reentrant, plain, reentrant, unknown

VERSION = version_numbers(megatron_version())
needs_seam = pytest.mark.skipif(VERSION < (0, 17), reason="Megatron-Core 0.16 has no dsa.fused_qk_topk_naive")
needs_sharing = pytest.mark.skipif(VERSION < (0, 19), reason="no layer shares positions before Megatron-Core 0.19")
HIDDEN, HEADS, LENGTH, BATCH, KEPT = 16, 2, 12, 2, 3


class Norm(nn.LayerNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)


class Layer(nn.Module):
    def __init__(self, config: Any, layer_number: int) -> None:
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.spec_utils import ModuleSpec

        super().__init__()
        linears = dict.fromkeys(("linear_wq_b", "linear_wk", "linear_weights_proj"), DuplicatedLinear)
        indexer = ModuleSpec(module=dsa.DSAIndexer, submodules=dsa.DSAIndexerSubmodules(k_norm=Norm, **linears))
        self.causal = AttnMaskType.causal
        self.attention = dsa.DSAttention(
            config, dsa.DSAttentionSubmodules(indexer=indexer), layer_number, self.causal, "self", k_channels=8
        )
        self.projection = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        queries = self.projection(hidden).unflatten(2, (3, HEADS, HIDDEN // HEADS)).unbind(2)
        # The fourth is the attention mask; named, for versions put more between the fifth and the last.
        return hidden + self.attention(*queries, None, x=hidden, qr=hidden, attn_mask_type=self.causal)


class Model(nn.Module):
    """A pipeline stage of dense layers, for it has no router."""

    def __init__(self, num_layers: int = 2, **options: Any) -> None:
        from megatron.core.transformer.transformer_config import MLATransformerConfig

        super().__init__()
        torch.manual_seed(1)
        fields = {
            "num_layers": num_layers, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_moe_experts": 8,
            "moe_router_load_balancing_type": "none", "add_bias_linear": False, "multi_latent_attention": True,
            "q_lora_rank": None, "qk_pos_emb_head_dim": 4, "rope_type": "rope", "dsa_indexer_n_heads": 2,
            "dsa_indexer_head_dim": 8, "dsa_indexer_topk": KEPT, "dsa_indexer_loss_coeff": 0.0,
            "apply_rope_fusion": False,
        }  # fmt: skip
        self.config = MLATransformerConfig(**{**fields, **options})
        self.layers = nn.ModuleList(Layer(self.config, number + 1) for number in range(num_layers))
        self.around: Around = reentrant

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = self.around(layer, hidden)
        return hidden

    def change_indexers(self) -> None:
        """Let indexers choose by other weights from now on."""
        for layer in self.layers:
            if layer.attention.indexer is not None:
                layer.attention.indexer.linear_wq_b.weight.data.normal_()


def selective(layer: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    """A checkpoint that saves what batched products gave, as scoring is one, and pairs them with a recompute's in order."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.bmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    return checkpoint(layer, hidden, use_reentrant=False, context_fn=contexts)


@pytest.fixture(autouse=True)
def _hadamard_is_left_out(megatron: None) -> Iterator[None]:
    """Rotating is a kernel of its own, which nothing here is about."""
    ParallelSizes().initialize()
    with mock.patch.object(dsa, "rotate_activation", lambda x: x):
        yield


@contextmanager
def attended() -> Iterator[list[Tensor]]:
    """Yield the positions that each call of sparse attention gets, in order."""
    seen: list[Tensor] = []
    original = dsa.unfused_dsa_fn

    def attend(query: Any, key: Any, value: Any, topk_indices: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(topk_indices.clone())
        return original(query, key, value, topk_indices, *args, **kwargs)

    with mock.patch.object(dsa, "unfused_dsa_fn", attend):
        yield seen


def hidden(number: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(LENGTH, BATCH, HIDDEN, generator=generator).requires_grad_()


def gradients(model: Model) -> list[Tensor | None]:
    return [each.grad for each in model.parameters()]


def same(some: list[Tensor | None], others: list[Tensor | None]) -> bool:
    return all(
        (one is None and other is None) or (one is not None and other is not None and torch.equal(one, other))
        for one, other in zip(some, others, strict=True)
    )


def are_repeated(seen: list[Tensor]) -> bool:
    """Whether the recomputes of two layers attended where their forwards did."""
    return all(torch.equal(one, again) for one, again in zip(seen[:2], reversed(seen[2:]), strict=True))


def expected_gradients(**options: Any) -> list[Tensor | None]:
    model = Model(**options)
    model.around = plain
    model(hidden()).sum().backward()
    return gradients(model)


@needs_seam
@pytest.mark.parametrize("around", [reentrant, non_reentrant, selective])
def test_gradients_are_those_of_no_recompute_though_indexers_changed(around):
    model = Model()
    model.around = around
    with attended() as seen:
        loss = model(hidden()).sum()
        model.change_indexers()
        loss.backward()
    # Without a freeze it attends elsewhere, unless the checkpoint saves the scores.
    assert torch.equal(seen[1], seen[2]) == (around is selective)
    model = Model()
    model.around = around
    with attended() as seen, mrr.freeze_recompute(model) as session:
        loss = model(hidden()).sum()
        model.change_indexers()
        loss.backward()
    assert are_repeated(seen)
    assert same(gradients(model), expected_gradients())
    assert session.report.indexer_recomputes == 2
    assert "recomputes of indexers" in str(session.report)
    assert "nothing to freeze" not in str(session.report)


@needs_seam
def test_a_recompute_scores_nothing():
    model = Model()
    with mock.patch.object(dsa, "_compute_index_scores", wraps=dsa._compute_index_scores) as scores:
        with mrr.freeze_recompute(model):
            loss = model(hidden()).sum()
            assert scores.call_count == 2
            loss.backward()
        # The loss of 0.17 and 0.18 is taken in every training step, whatever its coefficient.
        assert scores.call_count == (2 if VERSION >= (0, 19) else 6)


@needs_seam
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("around", [reentrant, non_reentrant])
def test_the_loss_of_an_indexer_takes_live_scores_and_its_positions_are_frozen(around, sparse):
    options = {"dsa_indexer_loss_coeff": 0.5, "dsa_indexer_use_sparse_loss": sparse}
    model = Model(**options)
    model.around = around
    with attended() as seen, mrr.freeze_recompute(model):
        model(hidden()).sum().backward()
        assert model.layers[0].attention.indexer.linear_wq_b.weight.grad.abs().sum() > 0
        assert same(gradients(model), expected_gradients(**options))
        seen.clear()
        loss = model(hidden()).sum()
        model.change_indexers()
        loss.backward()
    assert are_repeated(seen)


@needs_sharing
@pytest.mark.parametrize("around", [reentrant, non_reentrant])
def test_a_layer_that_shares_positions_gets_those_of_its_own_micro_batch(around):
    model = Model(num_layers=3, dsa_indexer_topk_freq=3)
    model.around = around
    with attended() as seen, mrr.freeze_recompute(model) as session:
        losses = [model(hidden(number)).sum() for number in range(2)]
        model.change_indexers()
        for loss in losses:  # the older first: by then the config has the positions of the younger
            loss.backward()
    assert session.report.indexer_recomputes == 6
    forwards, recomputes = seen[:6], seen[6:]
    assert not torch.equal(forwards[0], forwards[3])
    expected = [forwards[0]] * 3 + [forwards[3]] * 3
    assert [torch.equal(a, b) for a, b in zip(expected, recomputes, strict=True)] == [True] * 6
    kept = model.config._dsa_index_share_topk_holder
    assert torch.equal(kept[1], forwards[3]), "a recompute left its positions where the next forward reads"


@needs_sharing
def test_a_selective_checkpoint_pairs_nothing_of_a_layer_that_shares_positions():
    model = Model(num_layers=3, dsa_indexer_topk_freq=3)
    model.around = selective
    with mrr.freeze_recompute(model):
        loss = model(hidden()).sum()
        model.change_indexers()
        loss.backward()
    assert same(gradients(model), expected_gradients(num_layers=3, dsa_indexer_topk_freq=3))


@contextmanager
def remembered_tapes() -> Iterator[list[Tape]]:
    """Yield the tapes that are made, in order."""
    original, tapes = Tape.__init__, list[Tape]()

    def made(self: Tape) -> None:
        original(self)
        tapes.append(self)

    with mock.patch.object(Tape, "__init__", made):
        yield tapes


@needs_seam
@pytest.mark.parametrize(("highest", "dtype"), [(sparse._NONE, torch.uint16), (LENGTH - 1, torch.int32)])
def test_a_tape_keeps_two_bytes_a_position_where_they_do_and_only_in_checkpoints(highest, dtype):
    model = Model(num_layers=1)
    with mock.patch.object(sparse, "_NONE", highest), mrr.freeze_recompute(model), remembered_tapes() as tapes:
        loss = model(hidden()).sum()
        (entry,) = tapes[0].entries
        assert (entry.topk_indices.dtype, entry.topk_indices.shape) == (dtype, (BATCH, LENGTH, KEPT))
        loss.backward()
        model.around = plain
        with torch.no_grad():
            model(hidden())
        assert len(tapes) == 1


def test_shared_positions_that_their_layer_did_not_keep_are_kept_whole():
    positions = torch.tensor([[[70_000, 3, -1]]])
    choice = sparse.Choice(SimpleNamespace(skip_topk=True, source_layer=1), recompute_of=None, is_written=True)
    choice.shared({1: positions})
    assert torch.equal(decode_positions(choice.kept), positions)


@needs_sharing
def test_layers_that_share_positions_keep_them_once():
    model = Model(num_layers=3, dsa_indexer_topk_freq=3)
    with mrr.freeze_recompute(model), remembered_tapes() as tapes:
        loss = model(hidden()).sum()
        first, second, third = (each.entries[0].topk_indices for each in tapes)
        assert first is second is third
        loss.backward()


@pytest.mark.parametrize(("num_keys", "dtype"), [(1, torch.uint16), (65535, torch.uint16), (65536, torch.int32)])
def test_positions_survive_being_kept(num_keys, dtype):
    positions = torch.tensor([[[0, num_keys - 1, -1], [-1, -1, num_keys // 2]]])
    kept = encode_positions(positions, num_keys)
    assert kept.dtype == dtype
    assert torch.equal(decode_positions(kept), positions)


@needs_seam
def test_a_backward_behind_the_session_still_attends_where_its_forward_did():
    model = Model()
    with attended() as seen:
        with mrr.freeze_recompute(model):
            loss = model(hidden()).sum()
        model.change_indexers()
        loss.backward()
        assert are_repeated(seen)
        seen.clear()
        model(hidden()).sum().backward()  # nobody holds it any more, and the tape says so
    assert are_repeated(seen)


def half(layer: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    """A checkpoint whose recompute gets half of the tokens."""
    lengths = iter([LENGTH, LENGTH // 2])
    return reentrant(lambda x: layer(x[: next(lengths)]), hidden)


@needs_seam
@pytest.mark.parametrize(
    ("around", "message"),
    [
        (unknown, "MRR412: the indexer of layer 2 is recomputed, but no tape"),
        (half, r"MRR413: the indexer of layer 2 is recomputed for \[2, 6\] tokens"),
    ],
)
def test_a_recompute_that_no_tape_tells_of_or_of_other_tokens_raises(around, message):
    model = Model()
    model.around = around
    with pytest.raises(ReplayStateError, match=message), mrr.freeze_recompute(model):
        model(hidden()).sum().backward()


@needs_seam
def test_a_recompute_of_a_forward_before_the_session_raises():
    model = Model()
    loss = model(hidden()).sum()
    before = pytest.raises(ReplayStateError, match=r"MRR413: the indexer of layer 2 is recomputed as call 1")
    with before, mrr.freeze_recompute(model):
        loss.backward()


@needs_seam
def test_an_attention_that_goes_around_the_seam_raises():
    model = Model()
    with mrr.freeze_recompute(model):
        asking = dsa.fused_qk_topk_naive

    def silent(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:  # as a fused kernel would
        return None, torch.zeros(BATCH, LENGTH, KEPT, dtype=torch.int64)

    def twice(*args: Any, **kwargs: Any) -> Any:
        asking(*args, **kwargs)
        return asking(*args, **kwargs)

    @functools.wraps(asking)
    def shifted(*args: Any, **kwargs: Any) -> Any:  # looks like the hook; behind what the tape keeps
        scores, positions = asking(*args, **kwargs)
        return scores, (positions - torch.randint(2, positions.shape)).clamp(min=0)

    replaced = r"MRR415: dsa.fused_qk_topk_naive was replaced"
    # Some are marked as the hook is, so that only the call itself can tell.
    for instead, marked, message in (
        (silent, True, "MRR414: the indexer of layer 1 .*without asking"),
        (twice, True, "MRR414: the indexer of layer 1 .*twice"),
        (silent, False, replaced),
        (twice, False, replaced),
        (shifted, False, replaced),
    ):
        if marked:
            instead.is_hook = instead
        with (
            pytest.raises(ReplayStateError, match=message),
            mrr.freeze_recompute(model),
            mock.patch.object(dsa, "fused_qk_topk_naive", instead),
        ):
            model(hidden())
        if marked:
            del instead.is_hook


@needs_seam
def test_one_freeze_at_a_time():
    model = Model()
    session = mrr.freeze_recompute(model)
    with pytest.raises(ReplayStateError, match=r"MRR404: the indexer of layer 1 .* is under another session"):
        mrr.freeze_recompute(model)
    assert mrr.close_sessions(model) == 1
    with mrr.freeze_recompute(model):
        pass
    session.close()


class Other(nn.Module):
    """An attention that nobody here has read."""

    def __init__(self, indexer: nn.Module) -> None:
        super().__init__()
        self.indexer = indexer


def fused(model: Model) -> None:
    model.layers[0].attention.config.dsa_kernel_backend = "tilelang"


def captured(model: Model) -> None:
    model.config.cuda_graph_impl = "local"


def wrapped(model: Model) -> None:
    model.layers[0].attention.forward = model.layers[0].attention.forward


def overridden(model: Model) -> None:
    attention = model.layers[0].attention
    attention.__class__ = type("Faster", (type(attention),), {"forward": lambda self, *args, **kwargs: None})


def strange(model: Model) -> None:
    model.layers[0].attention = Other(model.layers[0].attention.indexer)


def exchanged(model: Model) -> None:
    model.layers[0] = Layer(model.config, 1)


@needs_seam
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (wrapped, "forward was replaced"),
        (exchanged, "the attention was exchanged"),
        (overridden, "the attention got the class Faster"),
    ],
)
def test_an_attention_that_changed_during_the_session_raises_at_its_end(change, told):
    model = Model()
    message = rf"MRR419[\s\S]*layer 1 \(layers.0.attention\): {told}"
    with pytest.raises(ReplayStateError, match=message), mrr.freeze_recompute(model):
        change(model)


@needs_seam
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(fused, "dsa_kernel_backend='tilelang' chooses positions in fused kernels", marks=needs_sharing),
        (captured, "a CUDA graph captures the attention"),
        (wrapped, "DSAttention.forward is replaced or overridden"),
        (overridden, "DSAttention.forward is replaced or overridden"),
        (strange, "DSAIndexer is an indexer of an attention that nobody here has read"),
    ],
)
def test_what_cannot_be_frozen_is_refused_by_name(change, reason):
    model = Model()
    change(model)
    with pytest.raises(UnsupportedRouterError, match=r"^MRR401") as error:
        mrr.freeze_recompute(model)
    assert reason in str(error.value)
    assert "indexers=False" in str(error.value)
    assert f"refused by freeze_recompute: {reason}" in str(mrr.explain(model))
    with mrr.freeze_recompute(model, indexers=False) as session:
        assert session.report.indexer_recomputes is None


def test_explain_lists_them_and_those_of_mtp_layers_are_told_apart():
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    model = Model()
    assert str(mrr.explain(model)).splitlines()[-1].startswith("chunk 0  sparse attention of layers 1, 2: ")
    model.mtp = bare(MultiTokenPredictionLayer, layer=Layer(model.config, 1))
    model.mtp_layers = nn.ModuleList([Layer(model.config, 2)])
    found = {each.name: each.is_mtp for each in find_indexers([walk(model)])}
    names = ("layers.0", "layers.1", "mtp.layer", "mtp_layers.0")
    assert found == {f"{name}.attention": name == "mtp.layer" for name in names}


@pytest.mark.skipif(VERSION >= (0, 17), reason="Megatron-Core tells its indexers here")
def test_before_0_17_an_indexer_is_refused():
    with pytest.raises(UnsupportedRouterError, match=r"MRR401: .*\n.*has no dsa.fused_qk_topk_naive"):
        mrr.freeze_recompute(Model())
