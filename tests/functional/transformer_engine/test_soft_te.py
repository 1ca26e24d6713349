"""The stand-in of Transformer Engine's extension: it computes as torch does, says what it lacks, and is put back."""

import os
import sys

import pytest
import torch
import transformer_engine_torch as extension
from torch import nn

from tests.support import soft_te


def test_numbers_of_enums_are_those_of_the_headers():
    dtypes = extension.DType
    assert [dtypes.kByte, dtypes.kInt32, dtypes.kFloat32, dtypes.kFloat16, dtypes.kBFloat16] == [0, 2, 4, 5, 6]
    assert [dtypes.kFloat8E4M3, dtypes.kFloat8E5M2, dtypes.kFloat4E2M1] == [7, 8, 10]
    forward, backward = extension.FP8FwdTensors, extension.FP8BwdTensors
    assert [forward.GEMM1_INPUT, forward.GEMM1_WEIGHT, forward.GEMM1_OUTPUT, forward.GEMM3_OUTPUT] == [0, 1, 2, 8]
    assert [backward.GRAD_OUTPUT1, backward.GRAD_INPUT1, backward.GRAD_OUTPUT2, backward.GRAD_INPUT3] == [0, 1, 2, 5]


def test_a_class_of_a_newer_release_fails_at_its_import_and_a_function_when_it_is_called():
    with pytest.raises(ImportError, match="cannot import name 'NewEnum'"):
        from transformer_engine_torch import NewEnum  # noqa: F401
    with pytest.raises(AttributeError, match="kFloat2"):
        extension.DType.kFloat2  # noqa: B018
    with pytest.raises(NotImplementedError, match=r"transformer_engine_torch\.new_kernel is not written"):
        extension.new_kernel(1)
    with pytest.raises(TypeError, match="positional arguments but"):
        extension.rmsnorm_bwd(*[None] * 7)


def test_it_is_loaded_before_megatron_or_not_at_all():
    with pytest.raises(RuntimeError, match=r"Transformer Engine: .*transformer_engine.* is imported already"):
        soft_te.load(os.environ["TE_DIR"])


def test_everything_is_put_back():
    distributed = sys.modules["transformer_engine.pytorch.distributed"]

    def state():
        names = {name: value for owner in (torch.cuda, distributed) for name, value in vars(owner).items()}
        return names, torch.Tensor.is_cuda, torch._dynamo.config.disable

    before = state()
    with soft_te.on_cpu():
        assert torch.zeros(1).is_cuda
        assert state() != before
    assert state() == before


def test_norms_have_the_gradients_of_torch(megatron):
    from transformer_engine.pytorch import LayerNorm, RMSNorm

    for kind, torchs in ((RMSNorm, nn.RMSNorm), (LayerNorm, nn.LayerNorm)):
        results = []
        for norm in (kind(16, eps=1e-5, device="cpu"), torchs(16, eps=1e-5)):
            with torch.no_grad():
                norm.weight.copy_(torch.linspace(0.5, 2, 16))
            inputs = torch.randn(6, 16, generator=torch.Generator().manual_seed(3)).requires_grad_()
            with soft_te.on_cpu():
                output = norm(inputs)
                output.pow(3).sum().backward()
            results.append((output.detach(), inputs.grad, norm.weight.grad))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


SCORES = {
    "softmax": {},
    "softmax before the top-k": {"use_pre_softmax": True},
    "softmax, scaled": {"use_pre_softmax": True, "scaling_factor": 2.5},
    "sigmoid with a bias": {"score_function": "sigmoid", "expert_bias": torch.linspace(-0.5, 0.5, 8)},
    "sigmoid in groups": {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2},
}


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
def test_the_fused_router_is_megatrons_unfused_one(scores, megatron):
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    results = []
    for fused in (True, False):
        logits = torch.randn(32, 8, generator=torch.Generator().manual_seed(3)).requires_grad_()
        with soft_te.on_cpu():
            probs, routing_map = topk_routing_with_score_function(logits, 4, fused=fused, **scores)
            (probs * torch.arange(8)).sum().backward()
        results.append((probs.detach(), routing_map, logits.grad))
    torch.testing.assert_close(*results)


def test_quantized_numbers_are_those_of_fp8(megatron):
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    values = torch.randn(16, 32, generator=torch.Generator().manual_seed(3))
    with soft_te.on_cpu():
        quantized = Float8CurrentScalingQuantizer(extension.DType.kFloat8E4M3, torch.device("cpu"))(values)
        restored = quantized.dequantize()
    scale = 448 / values.abs().max()  # of e4m3's largest number
    assert torch.equal(quantized._transpose, quantized._data.t())
    torch.testing.assert_close(restored, (values * scale).to(torch.float8_e4m3fn).float() / scale)
    assert not torch.equal(restored, values)
