"""The Triton kernels: interpreted on a CPU against reference and formula; compiled for a GPU, and run where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_router_replay.fused import route
from megatron_router_replay.fused.routing import HAVE_TRITON
from tests.unit.fused.cases import MODES, SHAPES, formula, inputs, largest_error, outcome
from tests.unit.fused.interpreted import CASES, DTYPES

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="triton is not installed")

# The interpreter cuts off float32 to make bfloat16 where a GPU rounds: up to 2 units in the last place and their sums.
TOLERANCE = {"fp32": 1e-6, "fp16": 2**-9, "bf16": 2**-4}


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("interpreted") / "results.pt"
    subprocess.run(
        [sys.executable, "-m", "tests.unit.fused.interpreted", str(path)],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
        timeout=600,
    )
    return torch.load(path)


@pytest.mark.parametrize(("mode", "shape", "dtype"), CASES)
def test_the_kernels_do_what_the_reference_does(mode, shape, dtype, interpreted):
    logits, topk_indices, weights = inputs(*SHAPES[shape], DTYPES[dtype])
    expected = outcome(lambda leaf: route(leaf, topk_indices, backend="torch", **MODES[mode]), logits, weights)
    actual = interpreted["cases"][mode, shape, dtype]
    assert [tensor.dtype for tensor in actual] == [tensor.dtype for tensor in expected]
    assert largest_error(actual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
def test_the_kernels_are_the_formula(mode, shape, interpreted):
    logits, topk_indices, weights = inputs(*SHAPES[shape], torch.float32)
    probs, routing_map = formula(leaf := logits.double().requires_grad_(), topk_indices, MODES[mode])
    (probs * weights).sum().backward()
    assert leaf.grad is not None
    assert largest_error(interpreted["cases"][mode, shape, "fp32"], (probs.detach(), routing_map, leaf.grad)) < 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_in_fp16_the_kernels_round_where_the_reference_does(mode, interpreted):
    """Were one rounding left out or added, probabilities would differ in most of the 64 rows."""
    logits, topk_indices, weights = inputs(64, 32, 4, torch.float16)
    probs, _, grad = outcome(lambda leaf: route(leaf, topk_indices, backend="torch", **MODES[mode]), logits, weights)
    actual, _, actual_grad = interpreted["cases"][mode, "64x32x4", "fp16"]
    assert int((actual != probs).sum()) <= 2
    assert int((actual_grad != grad).sum()) <= 2


def test_rows_that_do_not_name_topk_distinct_experts_are_nan(interpreted):
    assert interpreted["wrong rows"].isnan().all(dim=1).tolist() == [False, True, True, True]
    assert interpreted["wrong rows"][0].tolist() == [0.5, 0.5, 0, 0, 0, 0, 0, 0]


def test_no_tokens_pass(interpreted):
    assert [tensor.shape for tensor in interpreted["empty"]] == [(0, 8), (0, 8)]


def test_a_gradient_may_have_any_strides(interpreted):
    """Experts 0 and 1 have probabilities 0.5 and gradients 0 and 4: 0.5 * (0 - 2) and 0.5 * (4 - 2)."""
    assert interpreted["strided"][0].tolist() == [-1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["route_forward", "route_backward"])
@pytest.mark.parametrize("score", range(4))
def test_the_kernels_compile_for_a_gpu(score, kernel):
    import triton
    from triton.backends.compiler import GPUTarget

    from megatron_router_replay.fused import kernels

    function = getattr(kernels, kernel)
    names = function.arg_names
    constants = {"SCORE": score, "SCALED": True, "TOPK": 6, "SLOTS": 8, "EXPERTS": 64, "ROWS": 32}
    types = {
        "topk_indices": "*u8",
        "routing_map": "*u8",
        "scores": "*bf16" if score == 1 else "*fp32",
        "scaling_factor": "fp32",
    }
    pointers = ("logits", "routing_probs", "grad_probs", "grad_logits")
    signature = {
        name: "constexpr" if name in constants else types.get(name, "*bf16" if name in pointers else "i32")
        for name in names
    }
    source = triton.compiler.ASTSource(
        function, signature, {(names.index(name),): value for name, value in constants.items()}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "sm_90" in compiled.asm["ptx"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("mode", "shape", "dtype"), CASES)
def test_on_a_gpu_the_kernels_do_what_the_reference_does_without_a_sync(mode, shape, dtype):
    logits, topk_indices, weights = (tensor.cuda() for tensor in inputs(*SHAPES[shape], DTYPES[dtype]))
    expected = outcome(lambda leaf: route(leaf, topk_indices, backend="torch", **MODES[mode]), logits, weights)
    outcome(lambda leaf: route(leaf, topk_indices, **MODES[mode]), logits, weights)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = outcome(lambda leaf: route(leaf, topk_indices, **MODES[mode]), logits, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert largest_error(actual, expected) < {"fp32": 1e-6, "fp16": 2**-9, "bf16": 2**-6}[dtype]
