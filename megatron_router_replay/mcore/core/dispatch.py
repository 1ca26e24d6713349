"""Check that a token dispatcher gets the very map and probabilities that left its router.

    TopKRouter.routing returns (probs, map)         the hook leaves both here, for this router in this thread
    dispatch_preprocess(hidden, map, probs)         gets the same two tensors, or raises

Hooks, wrappers and modules between the two may read the tensors, and hand them on. Memory and version are compared, without a
device synchronization. Nothing sees a write that no version counts: through `.data`, numpy, DLPack, or a collective.

Source: Megatron-Core 0.16.1 to 0.19.2, MoELayer.preprocess, the only caller of `dispatch_preprocess`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.core import tape
from megatron_router_replay.mcore.model.upstream import DISPATCH_METHOD

TensorIdentity = tuple[
    weakref.ref[Tensor], weakref.ref[Any], int, torch.Size, tuple[int, ...], torch.dtype, int | Tensor
]
"""A tensor that left a router: (itself, its storage, its address, shape, strides, dtype, how often it was written to). The
first two are weak, for a forward that fails must not keep its graph; of an inference tensor, which counts no writes, the last
one is a copy."""


def identity_of(tensor: Tensor) -> TensorIdentity:
    """Return the identity of a tensor."""
    return (
        weakref.ref(tensor),
        weakref.ref(tensor.untyped_storage()),
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.clone() if tensor.is_inference() else tensor._version,
    )


def change_of(entering: Tensor, identity: TensorIdentity) -> str | None:
    """Return the words for a tensor that is not the one which left its router, or was written to since; None: neither."""
    tensor, storage, address, shape, stride, dtype, version = identity
    # Not the tensors alone, because autograd hands on aliases where a module has a full backward hook. While a storage
    # lives, no different tensor can have its address.
    is_same = entering.data_ptr() == address and (
        entering is tensor()
        or (
            entering.untyped_storage() is storage()
            and entering.shape == shape
            and entering.stride() == stride
            and entering.dtype is dtype
        )
    )
    if not is_same:
        return "a different tensor"
    is_unwritten = entering._version == version if isinstance(version, int) else has_values(entering, version)
    return None if is_unwritten else "written in place"


def has_values(entering: Tensor, values: Tensor) -> bool:
    """Return whether an inference tensor still has its values; on a CUDA device an assertion follows instead."""
    same = (entering == values).all()
    if same.device.type == "cpu":
        return bool(same)
    torch._assert_async(same, "a routing map or probabilities were written to between a router and its dispatcher")
    return True


class RoutedOutputs(NamedTuple):
    """Identify the outputs of a router's call, for its token dispatcher."""

    routing_map: TensorIdentity
    probs: TensorIdentity | None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.outputs: dict[int, RoutedOutputs] = {}
        """By the router's id. The next call with this id, or the end of the session, removes what no dispatcher took."""


thread = _Thread()

held_routers: WeakSet[Any] = WeakSet()
"""Routers with a source: only the outputs of their routing may enter their dispatchers."""

compared_routers: WeakSet[Any] = WeakSet()
"""Routers that ever had a source and a token dispatcher, whose outputs are compared."""

_router_of: WeakKeyDictionary[Any, weakref.ref[Any]] = WeakKeyDictionary()
"""Token dispatcher -> the router of its layer."""


def check_dispatchers(router: Any, dispatchers: Iterable[Any]) -> None:
    """Compare what these dispatchers get with what leaves the router, from now on."""
    for dispatcher in dispatchers:
        _router_of[dispatcher] = weakref.ref(router)
        compared_routers.add(router)
        kind = type(dispatcher)
        # The class, because torch.compile may have traced the method of an object. Megatron-Core pads maps inside of it.
        if not hasattr(vars(kind).get(DISPATCH_METHOD), "checks_dispatch"):
            setattr(kind, DISPATCH_METHOD, _checked(kind, getattr(kind, DISPATCH_METHOD)))


def is_checked(dispatcher: Any) -> bool:
    """Return whether this dispatcher's inputs are compared with what left its router."""
    method = getattr(type(dispatcher), DISPATCH_METHOD, None)
    return dispatcher in _router_of and hasattr(method, "checks_dispatch")


def _checked(kind: type, original: Any) -> Any:
    @functools.wraps(original)
    def dispatch_preprocess(self: Any, hidden_states: Any, routing_map: Tensor, probs: Tensor, *rest: Any) -> Any:
        # A subclass that calls this has been checked where the layer called it.
        if type(self) is kind:
            _check(self, routing_map, probs)
        return original(self, hidden_states, routing_map, probs, *rest)

    dispatch_preprocess.checks_dispatch = True  # type: ignore[attr-defined]
    return dispatch_preprocess


@_disable_dynamo
def _check(dispatcher: Any, routing_map: Tensor, probs: Tensor) -> None:
    reference = _router_of.get(dispatcher)
    router = None if reference is None else reference()
    if router is None:
        return
    outputs = thread.outputs.pop(id(router), None)
    if outputs is None:
        if router in held_routers:
            raise ReplayStateError(
                f"MRR415: {tape.layer_of(router)}: its token dispatcher got a routing map that Megatron-Core's "
                "TopKRouter.routing did not make for this router. Was the router exchanged? What replaces one of its methods "
                "must call on; import megatron_router_replay.mcore before you wrap a method of the class."
            )
        return
    for entering, identity in ((routing_map, outputs.routing_map), (probs, outputs.probs)):
        if identity is not None and (change := change_of(entering, identity)) is not None:
            what = "another routing map" if entering is routing_map else "other probabilities"
            raise ReplayStateError(
                f"MRR415: {tape.layer_of(router)}: its token dispatcher got {what} than left the router ({change}). A hook, "
                "wrapper or module between the two may read both tensors; it must hand them on, and not change or copy them."
            )
