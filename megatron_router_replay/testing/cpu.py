"""megatron_on_cpu(): run the stock GPTModel on a CPU over gloo, with no change to Megatron-Core's files.

Megatron-Core calls torch.cuda and passes device="cuda" on any machine. While the context manager is active, those
calls run on the CPU; after it, every attribute is restored. In the order they are made:

1. Megatron is imported *before* anything is patched, so no Megatron module captures a replaced function.
2. torch.cuda's devices, streams, events, random states and memory statistics become CPU ones (`cuda_stand_ins.py`).
3. Factory functions, Tensor.to, Tensor.cuda and friends read device="cuda" as "cpu" and drop pin_memory. They are
   wrapped, because a TorchFunctionMode is off inside torch.autograd.backward, where recomputes run.
4. Six places in Megatron-Core that assume CUDA or Transformer Engine are mended (`_megatron_patches`).
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_router_replay.testing import cuda_stand_ins

_FACTORY_METHODS = ["new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"]

# What moe_utils imports from Transformer Engine and reads also where that import failed.
_TRANSFORMER_ENGINE_SYMBOLS = [
    "fused_compute_score_for_moe_aux_loss",
    "fused_moe_aux_loss",
    "fused_permute",
    "fused_permute_with_probs",
    "fused_sort_chunks_by_index",
    "fused_sort_chunks_by_index_with_probs",
    "fused_topk_with_score_function",
    "fused_unpermute",
    "te_general_gemm",
]

Patch = tuple[Any, str, Any]
"""An owner, the name of an attribute of it, and its value while Megatron runs on a CPU."""

_lock = threading.RLock()
_depth = 0
_patched = contextlib.ExitStack()


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Let Megatron-Core build, run and train models on the CPU in a `with` block.

    Re-entrant: only the outermost block patches and restores. The patches are process-wide, so other threads see them.
    On a machine with CUDA the block forces the CPU all the same (torch.cuda.is_available() is False inside), so
    use it there in a process that has not put Megatron on the GPU.

    Notes:

    - models need deallocate_pipeline_outputs=False, and interleaved schedules overlap_p2p_comm=True with
      batch_p2p_comm=False (`load_qwen3_moe` sets them): gloo sends later from memory that Megatron frees at once, and
      batched messages between the same two ranks swap silently;
    - the CPU generator plays both generators, so a tracker's fork() logs "CPU RNG state changed" on dropout;
    - `with torch.device("meta")` keeps working, and with it transformers' from_pretrained. Import transformers
      before the block all the same: a module that copies a torch function at import keeps the copy.
    """
    global _depth
    with _lock:
        if _depth == 0:
            _apply()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _patched.close()


def is_active() -> bool:
    """Return if this process is inside megatron_on_cpu()."""
    return _depth > 0


def patches() -> list[Patch]:
    """Return every replacement that megatron_on_cpu() makes, in order; importing Megatron first."""
    megatron = _megatron_patches()  # imports Megatron: must come before anything is replaced
    return [*_torch_patches(), *cuda_stand_ins.replacements(), *megatron]


def _apply() -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    with contextlib.ExitStack() as stack:  # undoes the earlier patches if a later one fails
        stack.callback(RotaryEmbedding.forward.cache_clear)  # rotary tables made for another device
        for owner, name, value in patches():
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        RotaryEmbedding.forward.cache_clear()
        _patched.push(stack.pop_all())


def is_cuda_device(device: Any) -> bool:
    """Return if torch reads this argument as a CUDA device: "cuda", "cuda:1", 1, torch.device("cuda")."""
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _device_kwarg_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if is_cuda_device(kwargs.get("device")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return on_cpu


def _to_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and is_cuda_device(args[0]):
            args = ("cpu", *args[1:])
        if is_cuda_device(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return function(self, *args, **kwargs)

    return to


def _type_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let `tensor.type()` name a CUDA type: Megatron's distributed optimizer refuses all others."""

    @functools.wraps(function)
    def type_name(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        if isinstance(result, str) and not result.startswith("torch.cuda."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return type_name


def _itself(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _torch_patches() -> list[Patch]:
    # torch caches the factory functions that `with torch.device(...)` recognises. Filled inside the patches, the cache
    # would keep the wrapped ones for good: transformers would then leave its meta-device buffers unset.
    from torch.utils._device import _device_constructors

    factories = [
        name
        for name, function in vars(torch).items()
        if name.endswith("_like") or (callable(function) and function in _device_constructors())
    ]
    tensor = torch.Tensor
    return [
        *((torch, name, _device_kwarg_on_cpu(getattr(torch, name))) for name in factories),
        *((tensor, name, _device_kwarg_on_cpu(getattr(tensor, name))) for name in _FACTORY_METHODS),
        (tensor, "to", _to_on_cpu(tensor.to)),
        (tensor, "type", _type_on_cpu(tensor.type)),
        (tensor, "cuda", _itself),
        (tensor, "pin_memory", _itself),
        (tensor, "record_stream", _itself),
        (torch.nn.Module, "to", _to_on_cpu(torch.nn.Module.to)),
        (torch.nn.Module, "cuda", _itself),
    ]


def _megatron_patches() -> list[Patch]:
    """Import the part of Megatron-Core that a GPTModel needs and return what has to change in it."""
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.pipeline_parallel.schedules  # noqa: F401
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    missing = [name for name in _TRANSFORMER_ENGINE_SYMBOLS if not hasattr(moe_utils, name)]
    # 0.16 calls isinstance with a name that stands for no class without Transformer Engine.
    te_linear = getattr(multi_latent_attention, "TELinear", None)
    no_class = [] if isinstance(te_linear, type) else [(multi_latent_attention, "TELinear", ())]
    return [
        *((moe_utils, name, None) for name in missing),
        *no_class,
        (token_dispatcher, "maybe_move_tensor_to_cpu", _as_numpy_on_request),
        # A class attribute that the first dispatcher fills with a stream: it must not outlive the patches.
        (dispatcher, "cuda_dtoh_stream", None),
        (random, "_get_cuda_rng_state", cuda_stand_ins.get_rng_state),
        (random, "_set_cuda_rng_state", cuda_stand_ins.set_rng_state),
        (WrappedTorchNorm, "__new__", staticmethod(_new_norm)),
        *_later_patches(WrappedTorchNorm),
    ]


def _later_patches(norm: type) -> list[Patch]:
    """Return the patches of later versions of Megatron-Core; 0.16 and 0.17 have none of these names."""
    from megatron.core.transformer import multi_token_prediction

    later = []
    # After 0.19 it calls isinstance with classes that are None without Transformer Engine.
    if hasattr(multi_token_prediction, "is_inference_column_parallel_linear"):
        later.append((multi_token_prediction, "is_inference_column_parallel_linear", cuda_stand_ins.always(False)))
    with contextlib.suppress(ModuleNotFoundError):
        from megatron.core.models.hybrid import hybrid_block  # since 0.18; its last norm is always Transformer Engine's

        later.append((hybrid_block, "TENorm", norm))
    return later


def _as_numpy_on_request(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return all-to-all splits as numpy, as Megatron's function does for tensors that come from a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _new_norm(
    cls: type, config: Any, hidden_size: int, eps: float = 1e-5, *unused: Any, **unused_by_keyword: Any
) -> torch.nn.Module:
    """Build torch's norm also under sequence parallelism, marked so that its gradient is summed over the TP group."""
    if config.layernorm_zero_centered_gamma:
        raise ValueError("layernorm_zero_centered_gamma=True needs Transformer Engine; torch's norms do not have it.")
    norms = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
    norm: torch.nn.Module = norms[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm
