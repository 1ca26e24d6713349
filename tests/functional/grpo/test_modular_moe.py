"""Routes are captured at the router, before dispatch: the same for every way of running the experts behind it."""

import pytest
import torch

pytest.importorskip("transformers")

from examples.grpo.modular_moe import (
    BatchedExperts,
    BatchedPrepareFinalize,
    ContiguousExperts,
    ContiguousPrepareFinalize,
    ModularMoE,
    use_modular_moe,
)
from megatron_router_replay.capture import Capturer
from tests.unit.capture.sampling import build_model, experts_of, recompute, sample


@pytest.mark.parametrize(("form", "reduce_in"), [("contiguous", "finalize"), ("batched", "experts")])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe"])
@torch.no_grad()
def test_a_model_of_modular_layers_is_the_model_it_was(name, form, reduce_in):
    model = build_model(name)
    tokens = torch.randint(5, 300, (2, 30), generator=torch.Generator().manual_seed(1))
    before, names = model(tokens).logits, set(model.state_dict())
    use_modular_moe(model, activation_format=form, reduce_in=reduce_in)
    assert set(model.state_dict()) == names  # weights are synchronised under the same names
    torch.testing.assert_close(model(tokens).logits, before, rtol=0, atol=1e-4)
    capturer = Capturer(model, max_num_tokens=16)
    sequences, captured = sample(model, [[5, 6, 7, 8], [9, 10]], [6, 3], capturer)
    for row, sequence in enumerate(sequences):
        assert torch.equal(experts_of(captured[row]), experts_of(recompute(model, sequence)))


def moe_of(model, dispatch, experts):
    block = model.model.layers[0].mlp
    return ModularMoE(
        gate=block.gate,
        experts=block.experts,
        shared_experts=None,
        prepare_finalize=dispatch,
        apply_experts=experts(block.experts, reduces=False),
    )


@torch.no_grad()
def test_the_batched_format_holds_each_experts_tokens_in_order():
    dispatch = BatchedPrepareFinalize(max_tokens=3)
    hidden = torch.tensor([[1.0], [2.0], [3.0]])
    indices = torch.tensor([[2, 0], [2, 1], [0, 2]])
    tokens = dispatch.prepare(hidden, torch.ones(3, 2), indices, num_experts=4)
    assert tokens.activations[..., 0].tolist() == [[1, 3, 0], [2, 0, 0], [1, 2, 3], [0, 0, 0]]
    assert tokens.expert_num_tokens.tolist() == [2, 1, 3, 0]
    assert tokens.slots.tolist() == [[6, 0], [7, 3], [1, 8]]


def test_the_dispatch_side_gets_indices_in_the_dtype_it_asks_for():
    model = build_model("mixtral")
    for wanted, got in ((None, torch.int64), (torch.int32, torch.int32), (torch.uint8, torch.uint8)):
        layer = moe_of(model, ContiguousPrepareFinalize(wanted), ContiguousExperts)
        assert layer.select_experts(torch.randn(3, 64))[1].dtype is got


def test_parts_that_do_not_fit_are_refused():
    model = build_model("mixtral")
    with pytest.raises(ValueError, match="prepare gives the batched format, the experts take the contiguous one"):
        moe_of(model, BatchedPrepareFinalize(), ContiguousExperts)
    layer = moe_of(model, BatchedPrepareFinalize(max_tokens=1), BatchedExperts)
    with pytest.raises(ValueError, match="max_tokens=1"):
        layer(torch.ones(3, 64))
    with pytest.raises(ValueError, match="no MoE layer"):
        use_modular_moe(torch.nn.Linear(2, 2), activation_format="batched")
