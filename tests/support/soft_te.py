"""Transformer Engine's own Python on a CPU: its wheel without compiled code, over a stand-in of its C++ extension in torch.

    load(folder)    imports Transformer Engine, before Megatron-Core, which looks for it once; a process keeps it
    on_cpu()        what Transformer Engine requests of torch.cuda, for a `with` block inside megatron_on_cpu()

All modules, autograd functions, checkpoints, quantizers, recipes and random states are Transformer Engine's own. `KERNELS`
has the functions of `transformer_engine_torch` that a GPTModel calls in training. Any other one raises when it is called, and
a class or an enum of a newer release when it is imported. Not here: FlashAttention's and cuDNN's attention, MXFP8, NVFP4 and
block scaling, user buffers, CUDA graphs.

Source: Transformer Engine 2.8.0 and 2.20.2; numbers of enums, common/include/transformer_engine/transformer_engine.h and
pytorch/csrc/common.h.
"""

from __future__ import annotations

import enum
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

calls: Counter[str] = Counter()
"""How often each kernel was called."""

checkpoints: dict[str, Any] = {}
"""Transformer Engine's own, as they were loaded, before a session wraps them: by their names in its module `distributed`."""

EXTENSION = "transformer_engine_torch"

DTYPES = {0: torch.uint8, 2: torch.int32, 4: torch.float32, 5: torch.float16, 6: torch.bfloat16}
FP8_DTYPES = {7: torch.float8_e4m3fn, 8: torch.float8_e5m2}

# Their numbers index tensors and choose dtypes.
_NUMBERED = {
    "DType": {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
    "FP8FwdTensors": {
        "GEMM1_INPUT": 0,
        "GEMM1_WEIGHT": 1,
        "GEMM1_OUTPUT": 2,
        "GEMM2_INPUT": 3,
        "GEMM2_WEIGHT": 4,
        "GEMM2_OUTPUT": 5,
        "GEMM3_INPUT": 6,
        "GEMM3_WEIGHT": 7,
        "GEMM3_OUTPUT": 8,
    },
    "FP8BwdTensors": {
        "GRAD_OUTPUT1": 0,
        "GRAD_INPUT1": 1,
        "GRAD_OUTPUT2": 2,
        "GRAD_INPUT2": 3,
        "GRAD_OUTPUT3": 4,
        "GRAD_INPUT3": 5,
    },
    "NVTERoutingMapFormat": {"BYTEMAP": 0, "BITMAP_U8": 1},
}

# Python passes their members on to kernels that are not here; any name is a member.
_NAMES_ALONE = [
    "CommOverlapType",
    "Float8BlockScaleTensorFormat",
    "NVTEQBHistogramMode",
    "NVTEScalingMode",
    "NVTE_Bias_Type",
    "NVTE_Fused_Attn_Backend",
    "NVTE_Mask_Type",
    "NVTE_QKV_Format",
    "NVTE_QKV_Layout",
    "NVTE_Softmax_Type",
]

_CLASSES = ["CommOverlap", "CommOverlapHelper", "CommOverlapP2P", "FP8TensorMeta"]

# Packages that Transformer Engine imports for its export to ONNX and for layers without a GPTModel.
_UNUSED_PACKAGES = ["einops", "onnx", "onnxscript"]


class _AnyMember(type):
    """Type of an enum whose numbers nobody reads."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        member = int.__new__(cls, len(cls.__members__))  # type: ignore[call-overload]
        setattr(cls, name, member)
        return member

    @property
    def __members__(cls) -> dict[str, Any]:
        """Those that were named so far; Transformer Engine compares them with its own enum in Python."""
        return {name: member for name, member in vars(cls).items() if isinstance(member, cls)}


class Extension(types.ModuleType):
    """`transformer_engine_torch`, as far as it is needed."""

    def __init__(self) -> None:
        super().__init__(EXTENSION)
        self.__spec__ = importlib.machinery.ModuleSpec(EXTENSION, None)
        for name, members in _NUMBERED.items():
            setattr(self, name, enum.IntEnum(name, members))
        for name in _NAMES_ALONE:
            setattr(self, name, _AnyMember(name, (int,), {}))
        for name in _CLASSES:
            setattr(self, name, type(name, (), {}))
        for name, kernel in KERNELS.items():
            setattr(self, name, kernel)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name[0].isupper():
            raise AttributeError(f"{EXTENSION} of soft_te.py has no {name}: this Transformer Engine is newer")

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{EXTENSION}.{name} is not written in soft_te.py")

        return missing


def load(folder: str | Path) -> None:
    """Import Transformer Engine from the folder of its unpacked wheel, with `Extension` for its compiled part.

    The process keeps it: Megatron-Core's modules bind what they find when they are imported.

    Raises:
        RuntimeError: Megatron-Core, or another Transformer Engine, was imported before.
    """
    if early := {"megatron.core", "transformer_engine", "transformer_engine.pytorch.distributed"} & set(sys.modules):
        raise RuntimeError(f"cannot load Transformer Engine: {', '.join(sorted(early))} is imported already")
    sys.path.insert(0, str(folder))
    sys.modules[EXTENSION] = Extension()
    absent = {name: _unused_package(name) for name in _UNUSED_PACKAGES if importlib.util.find_spec(name) is None}
    sys.modules.update(absent)
    # No shared library is loaded, and no function is compiled.
    building = {"NVTE_PROJECT_BUILDING": "1", "NVTE_TORCH_COMPILE": "0"}
    with mock.patch.dict("os.environ", building), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = import_module("transformer_engine")  # it finds no extension for torch, and imports the rest
        with mock.patch.object(package.common, "load_framework_extension"), _triton_without_timing():
            import_module("transformer_engine.pytorch")
    distributed = sys.modules["transformer_engine.pytorch.distributed"]
    checkpoints.update({name: getattr(distributed, name) for name in ("_checkpoint_hook", "_recomputation_hook")})
    checkpoints["_CheckpointFunction.forward"] = vars(distributed._CheckpointFunction)["forward"]
    for name in absent:
        del sys.modules[name]  # transformers would believe that it is installed


@contextmanager
def _triton_without_timing() -> Iterator[None]:
    """Under TRITON_INTERPRET=1, let Transformer Engine's triton kernels take the first of their configurations."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import triton

    def autotune(configs: list[Any], key: list[str], **options: Any) -> Callable[[Any], Any]:
        return lambda kernel: _FirstConfiguration(kernel, configs[0].kwargs)

    with mock.patch.object(triton, "autotune", autotune):
        yield


class _FirstConfiguration:
    """A triton kernel with constants that are not searched for."""

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self.kernel, self.constants = kernel, constants
        self.fn, self.arg_names = kernel, getattr(kernel, "arg_names", None)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            calls[f"triton {self.kernel.__name__}"] += 1
            return self.kernel[grid](*args, **{**self.constants, **kwargs})

        return launch


def _unused_package(name: str) -> types.ModuleType:
    package = mock.MagicMock(name=name, __path__=[], __version__="0")
    package.__spec__ = importlib.machinery.ModuleSpec(name, None)
    package.__name__ = name
    return package


class _Properties:
    """Of a device of compute capability 9.0."""

    major, minor, multi_processor_count, name, total_memory = 9, 0, 132, "a CPU", 1 << 37


class _OneGenerator:
    """torch.cuda.default_generators: the CPU's plays all, as in megatron_on_cpu."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator


@contextmanager
def on_cpu() -> Iterator[None]:
    """Answer what Transformer Engine requests of torch.cuda in a `with` block inside megatron_on_cpu(); put all back."""
    cuda = {
        "default_generators": _OneGenerator(),
        "device": lambda *args: nullcontext(),
        "is_available": lambda: True,
        "is_bf16_supported": lambda *args: True,
    }
    with ExitStack() as stack:
        stack.enter_context(checkpoints_on_cpu())
        stack.enter_context(mock.patch.multiple(torch.cuda, **cuda))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(lambda self: True)))
        # What Megatron-Core compiles would be compiled for that device.
        stack.enter_context(torch._dynamo.config.patch(disable=True))
        random = import_module("megatron.core.tensor_parallel.random")
        if hasattr(random, "_get_share_storage"):  # since 0.17
            stack.enter_context(mock.patch.object(random, "_get_share_storage", return_value=_copy_storage))
        yield


def _copy_storage(target: Tensor, source: Tensor) -> None:
    """Stand for a C++ function of Megatron-Core, which takes 20 s to compile: it shares a storage where this copies it."""
    storage = source.untyped_storage()
    target.untyped_storage().resize_(storage.nbytes()).copy_(storage)


@contextmanager
def checkpoints_on_cpu() -> Iterator[None]:
    """Answer what Transformer Engine's checkpoints alone request; they keep the states of the CPU's generator."""
    cuda = {
        "get_device_capability": lambda *args: (9, 0),
        "get_device_properties": lambda *args: _Properties,
    }
    random_states = {
        "_get_cuda_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "_lazy_call": lambda call, **kwargs: call(),
        "_lazy_init": lambda: None,
        "_set_cuda_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "graph_safe_rng_available": lambda: False,  # a CPU's generator has no state that a graph could register
    }
    distributed = sys.modules["transformer_engine.pytorch.distributed"]
    with mock.patch.multiple(torch.cuda, **cuda), mock.patch.multiple(distributed, **random_states):
        yield


# ---- the extension's functions, with the arguments that Transformer Engine gives them
KERNELS: dict[str, Callable[..., Any]] = {
    "get_cublasLt_version": lambda: 130000,
    "get_cudnn_version": lambda: 91200,
    "get_num_cublas_streams": lambda: 1,
}


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    name = function.__name__

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        with torch.no_grad():
            return function(*args, **kwargs)

    KERNELS[name] = counted
    return function


def _is_quantized(tensor: Any) -> bool:
    return tensor is not None and hasattr(tensor, "_fp8_dtype")


def _values(tensor: Any) -> Any:
    """Return the numbers that a GEMM multiplies: those of an FP8 tensor with their scale, from the layout that it has."""
    if not _is_quantized(tensor):
        return tensor
    if tensor._data is not None:
        data = tensor._data
    else:  # the columnwise part alone: [last, first, ...]
        data = tensor._transpose
        data = data.permute(*range(1, data.ndim), 0)
    calls[f"values of {FP8_DTYPES[int(tensor._fp8_dtype)]}"] += 1
    return data.contiguous().view(FP8_DTYPES[int(tensor._fp8_dtype)]).float() * tensor._scale_inv.float()


def _multiply(
    A: Tensor,  # noqa: N803  # column-major, as in cuBLAS
    transa: bool,
    B: Tensor,  # noqa: N803
    transb: bool,
) -> Tensor:
    """Return B @ A, each transposed as cuBLAS would."""
    first, second = _values(A), _values(B)
    common = torch.promote_types(first.dtype, second.dtype)
    first, second = first.to(common), second.to(common)
    left, right = second.reshape(-1, second.shape[-1]), first.reshape(-1, first.shape[-1])
    result = (left.t() if transb else left) @ (right.t() if transa else right)
    return result if transb else result.view(*second.shape[:-1], result.shape[-1])


@_kernel
def generic_gemm(
    A: Any,  # noqa: N803
    transa: bool,
    B: Any,  # noqa: N803
    transb: bool,
    D: Any,  # noqa: N803
    quantizer: Any,
    output_dtype: Any,
    bias: Any,
    bias_type: Any,
    gelu: bool,
    gelu_in: Any,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    *,
    comm_overlap: Any,
    comm_type: Any,
    extra_output: Any,
    bulk_overlap: bool,
    alpha: float,
    beta: float,
) -> tuple[Any, ...]:
    _refuse(gelu=gelu, comm_overlap=comm_overlap, extra_output=extra_output, bulk_overlap=bulk_overlap)
    assert alpha == 1, "a scaled GEMM is not written"
    result = _multiply(A, transa, B, transb)
    bias_grad = None
    if grad and bias is not None:
        rows = _values(B)
        bias_grad = rows.reshape(-1, rows.shape[-1]).sum(0).to(bias.dtype)
    elif bias is not None and bias.numel():
        result = result + bias
    if D is not None:
        result = D.view(result.shape).add_(result) if accumulate else D.view(result.shape).copy_(result)
    elif output_dtype is not None:
        result = result.to(DTYPES[int(output_dtype)])
    if quantizer is not None:
        result = quantize(result, quantizer)
    return result, bias_grad, gelu_in, extra_output


@_kernel
def te_general_grouped_gemm(
    A: list[Any],  # noqa: N803
    transa: bool,
    B: list[Any],  # noqa: N803
    transb: bool,
    D: list[Tensor],  # noqa: N803
    D_type: Any,  # noqa: N803
    m_splits: Any,
    bias: list[Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: Any,
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> list[Tensor]:
    outputs = D[0].split([int(size) for size in m_splits]) if single_output else D
    for number, output in enumerate(outputs):
        result = _multiply(A[number], transa, B[number], transb)
        if bias[number].numel():
            if grad:
                bias[number].copy_(_values(B[number]).sum(0))
            else:
                result = result + bias[number]
        output.add_(result.view(output.shape)) if accumulate else output.copy_(result.view(output.shape))
    return bias


def _refuse(**unwritten: Any) -> None:
    for name, value in unwritten.items():
        if value:
            raise NotImplementedError(f"{name}={value} is not written in soft_te.py")


def _output(value: Tensor, out: Any, quantizer: Any, dtype: Any) -> Any:
    """Return a norm's output in its dtype, quantized if wanted, in the tensor that was given for it."""
    value = value.to(DTYPES[int(dtype)])
    if quantizer is not None:
        return quantize(value, quantizer, out)
    return value if out is None else out.copy_(value)


@_kernel
def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, None, Tensor]:
    rsigma = (input.float().square().mean(-1) + eps).rsqrt()
    normed = input.float() * rsigma.unsqueeze(-1) * (weight.float() + zero_centered_gamma)
    return _output(normed, ln_out, quantizer, otype), None, rsigma


@_kernel
def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, Tensor, Tensor]:
    mu = input.float().mean(-1)
    centred = input.float() - mu.unsqueeze(-1)
    rsigma = (centred.square().mean(-1) + eps).rsqrt()
    normed = centred * rsigma.unsqueeze(-1) * (weight.float() + zero_centered_gamma) + bias.float()
    return _output(normed, ln_out, quantizer, otype), mu, rsigma


def _norm_backward(dz: Tensor, normed: Tensor, rsigma: Tensor, gamma: Tensor, centres: bool) -> tuple[Tensor, Tensor]:
    grad = dz.float() * gamma
    inner = (grad * normed).mean(-1, keepdim=True) * normed
    mean = grad.mean(-1, keepdim=True) if centres else 0
    return (grad - inner - mean) * rsigma.unsqueeze(-1), (dz.float() * normed).sum(0)


@_kernel
def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    normed = x.float() * rsigma.unsqueeze(-1)
    dx, dgamma = _norm_backward(dz, normed, rsigma, gamma.float() + zero_centered_gamma, centres=False)
    return dx.to(x.dtype), dgamma.to(gamma.dtype)


@_kernel
def layernorm_bwd(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor, Tensor]:
    normed = (x.float() - mu.unsqueeze(-1)) * rsigma.unsqueeze(-1)
    dx, dgamma = _norm_backward(dz, normed, rsigma, gamma.float() + zero_centered_gamma, centres=True)
    return dx.to(x.dtype), dgamma.to(gamma.dtype), dz.float().sum(0).to(gamma.dtype)


# ---- the fused router
def _scores(logits: Tensor, score_function: str, use_pre_softmax: bool) -> Tensor:
    if score_function == "softmax":
        return logits.softmax(-1) if use_pre_softmax else logits
    return logits.sigmoid() if score_function == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()


def _probabilities(
    logits: Tensor, routing_map: Tensor, topk: int, use_pre_softmax: bool, scaling: float | None, score_function: str
) -> Tensor:
    """Return [num_tokens, num_experts] probabilities of the chosen experts, and 0 elsewhere."""
    scores = _scores(logits.float(), score_function, use_pre_softmax)
    if score_function == "softmax" and not use_pre_softmax:
        scores = scores.masked_fill(~routing_map, float("-inf")).softmax(-1)
    scores = scores.masked_fill(~routing_map, 0)
    if score_function != "softmax" and topk > 1:
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return scores * (scaling or 1.0)


@_kernel
def fused_topk_with_score_function_fwd(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
    routing_map_format: int = 0,
    topk_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _refuse(routing_map_format=routing_map_format, topk_indices=topk_indices is not None)
    # 2.8.0's caller gives [num_tokens, num_experts]; 2.20.2's leaves the shape to the kernel.
    shape = logits.shape
    flat = logits.reshape(-1, shape[-1])
    scores = _scores(flat.float(), score_function, use_pre_softmax)
    scores = scores if expert_bias is None else scores + expert_bias
    if num_groups:
        assert group_topk is not None
        by_group = scores.view(len(scores), num_groups, -1)
        best = by_group.topk(topk // group_topk, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
        in_group = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, best, True)
        scores = by_group.masked_fill(~in_group.unsqueeze(-1), float("-inf")).view(scores.shape)
    chosen = scores.topk(topk, dim=-1).indices
    routing_map = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)
    probs = _probabilities(flat, routing_map, topk, use_pre_softmax, scaling_factor, score_function)
    return probs.to(logits.dtype).view(shape), routing_map.view(shape), logits.clone()


@_kernel
def fused_topk_with_score_function_bwd(*args: Any) -> Tensor | None:
    if isinstance(args[0], int):  # 2.8.0: (num_tokens, num_experts, ...), and it returns the gradient
        routing_map, logits, grad_probs, topk, use_pre_softmax, scaling, score_function = args[2:]
        grad_logits = torch.empty_like(grad_probs)
    else:
        routing_map, logits, grad_probs, grad_logits, topk, use_pre_softmax, scaling, score_function, *rest = args
        _refuse(routing_map_format=rest and rest[0], use_dense_indices=rest and rest[1])
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        probs = _probabilities(leaf, routing_map, topk, use_pre_softmax, scaling, score_function)
    (grad,) = torch.autograd.grad(probs, leaf, grad_probs.to(probs.dtype))
    return grad_logits.copy_(grad)  # type: ignore[no-any-return]


# ---- FP8 with one scale a tensor: delayed and current scaling
@_kernel
def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """Return an FP8 tensor, with what `quantizer` wants of it; from `output` on it is filled in place."""
    _refuse(noop=noop is not None and bool(noop))
    name = type(quantizer).__name__
    if name not in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        raise NotImplementedError(f"{name} is not written in soft_te.py")
    dtype = FP8_DTYPES[int(quantizer.dtype)]
    amax = tensor.float().abs().amax().reshape(1) if tensor.numel() else torch.zeros(1)
    if name == "Float8Quantizer":
        scale = quantizer.scale.float().reshape(1)
        quantizer.amax.copy_(torch.maximum(quantizer.amax.float().reshape(-1)[:1], amax).view_as(quantizer.amax))
    else:
        if quantizer.with_amax_reduction:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
        scale = torch.where(amax > quantizer.amax_epsilon, torch.finfo(dtype).max / amax, 1.0)
        scale = scale.log2().floor().exp2() if quantizer.force_pow_2_scales else scale
    largest = torch.finfo(dtype).max
    data = (tensor.float() * scale).clamp(-largest, largest).to(dtype).view(torch.uint8)
    if output is None:
        output = _empty(quantizer, tensor)
    if output._data is not None:
        output._data.copy_(data.view(output._data.shape))
    if output._transpose is not None:
        output._transpose.copy_(_transposed(data).view(output._transpose.shape))
        output._transpose_invalid = False
    output._scale_inv.copy_(1 / scale)
    return output


def _empty(quantizer: Any, tensor: Tensor) -> Any:
    """Return an FP8 tensor for these values, with no numbers yet."""
    output = quantizer.make_empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if not quantizer.rowwise_usage and output._transpose is not None:
        output._data = None
    return output


@_kernel
def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """What `make_empty` of 2.20.2 calls; 2.8.0's is Python."""
    tensors = import_module("transformer_engine.pytorch.tensor.float8_tensor")
    transposed = [shape[-1], *shape[:-1]]
    return tensors.Float8Tensor(
        shape=shape,
        dtype=dtype,
        data=torch.empty(shape, dtype=torch.uint8),
        fp8_scale_inv=torch.empty(1),
        fp8_dtype=quantizer.dtype,
        data_transpose=torch.empty(transposed, dtype=torch.uint8) if quantizer.columnwise_usage else None,
        quantizer=quantizer,
        device=torch.device("cpu"),
    )


def _transposed(data: Tensor) -> Tensor:
    """Return [last, first, ...] of [first, ..., last]."""
    return data.permute(data.ndim - 1, *range(data.ndim - 1)).contiguous()


@_kernel
def dequantize(tensor: Any, dtype: Any) -> Tensor:
    values: Tensor = _values(tensor)
    return values.to(DTYPES[int(dtype)])


@_kernel
def fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    result = _transposed(data)
    return result if out is None else out.copy_(result.view(out.shape))


@_kernel
def split_quantize(tensor: Tensor, splits: list[int], quantizers: list[Any], **options: Any) -> list[Any]:
    return [quantize(part, quantizer) for part, quantizer in zip(tensor.split([int(n) for n in splits]), quantizers)]


@_kernel
def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    return grad.reshape(-1, grad.shape[-1]).sum(0), quantize(grad, quantizer)


@_kernel
def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Roll each history by one, and take the scale from its largest entry: recipe.DelayedScaling's rule."""
    reduced = amax_reduction_buffer.split([len(scale) for scale in scales])
    largest = torch.finfo(FP8_DTYPES[int(fp8_dtype)]).max
    for amaxes, history, scale in zip(reduced, amax_histories, scales):
        history[0].copy_(amaxes)
        amax = history.amax(0) if amax_compute_algo == "max" else history[0].clone()
        history.copy_(history.roll(-1, 0))
        history[0].zero_()
        wanted = largest / amax / 2**margin
        scale.copy_(torch.where((amax > 0) & amax.isfinite(), wanted, scale))


@_kernel
def fused_multi_row_padding(
    input: Tensor, output: Tensor, input_row_list: list[int], padded_input_row_list: list[int]
) -> None:
    output.zero_()
    for source, target in zip(input.split(list(input_row_list)), output.split(list(padded_input_row_list))):
        target[: len(source)].copy_(source)


@_kernel
def fused_multi_row_unpadding(
    input: Tensor, output: Tensor, input_row_list: list[int], unpadded_input_row_list: list[int]
) -> None:
    for source, target in zip(input.split(list(input_row_list)), output.split(list(unpadded_input_row_list))):
        target.copy_(source[: len(target)])
