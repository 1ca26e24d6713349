"""Attach: a model takes `routing_rows` among its keyword arguments, so that the forward step needs no session.

mrr.attach(model_chunks)                                 # once, where the model is built
def forward_step(data_iterator, model):
    return model(**next(data_iterator)), loss_func       # with routing_rows in the batch, replay on or off
with mrr.replay(model_chunks, trace):                    # on
    forward_backward_func(forward_step_func=forward_step, ...)
"""

from __future__ import annotations

import weakref
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch._compile import _disable_dynamo

from megatron_router_replay.mcore.core import tape
from megatron_router_replay.mcore.model.find import (
    Models,
    as_chunks,
    check_has_experts,
    check_whole_pipeline,
    find_routers,
    unwrap,
    wrappers,
)

_attached: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
"""Innermost model -> the handle of its hook; a copy of the model has the hook, and no entry here."""


open_sessions: list[weakref.ref[Any]] = []
"""The open sessions that take micro-batches, the innermost last; sessions put themselves here."""


class Attached:
    """The hooks that `attach` put on model chunks."""

    def __init__(self, modules: list[nn.Module], handles: list[Any]) -> None:
        self._handles = list(zip(modules, handles))

    def close(self) -> None:
        """Take the hooks off; the model refuses `routing_rows` again."""
        for module, handle in self._handles:
            handle.remove()
            if _attached.get(module) is handle:
                del _attached[module]


def attach(model_chunks: Models) -> Attached:
    """Let the model's forward take routing rows as keyword arguments.

    These are `routing_rows`, the trace row of each position, of the shape of this rank's input_ids, -1 for none;
    `routing_padding`, an optional bool mask, True where a position is known to be padding; and `routing_trained`, an optional
    mask, non-zero where a position is trained on and must have a route.

    Call it once, after building the model; calling it again replaces the hooks. While a `replay` or `record` session is open
    on the model, each forward gives it the rows; otherwise they are dropped. So `output = model(**batch)` is the whole
    forward step, and the `with` around the schedule turns replay on. It works through wrappers that pass keyword arguments on
    (DistributedDataParallel, Float16Module, torch.compile) and on every pipeline stage; stages without MoE layers drop the
    rows. Copies of an attached model are attached too.

    Args:
        model_chunks: the model or all of its chunks on this rank.

    Returns:
        An object whose `close()` undoes it.

    Raises:
        LayoutError: a chunk has no experts, or not all chunks of a virtual pipeline are given.
    """
    chunks = as_chunks(model_chunks)
    check_has_experts(chunks, [find_routers(chunk) for chunk in chunks])
    check_whole_pipeline(chunks)
    modules = [unwrap(chunk) for chunk in chunks]
    for module in modules:
        if module in _attached:
            _attached.pop(module).remove()
    # In front of a session's own hook, which begins the micro-batch that this one queues.
    handles = [module.register_forward_pre_hook(_take_rows, with_kwargs=True, prepend=True) for module in modules]
    _attached.update(zip(modules, handles))
    return Attached(modules, handles)


def session_of(model: nn.Module) -> Any:
    """Return the innermost open session that takes micro-batches of this chunk, wrapped or not."""
    levels = {id(level) for level in wrappers(model)}
    for session in [reference() for reference in reversed(open_sessions)]:
        if session is not None and not levels.isdisjoint(session._chunk_of):
            return session
    return None


@_disable_dynamo
def _take_rows(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    kept = dict(kwargs)
    rows, padding, trained = (kept.pop(f"routing_{name}", None) for name in ("rows", "padding", "trained"))
    # A checkpoint around the whole chunk repeats the call with its arguments: that is no new forward.
    if rows is not None and not tape.in_recompute() and (session := session_of(module)) is not None:
        session.microbatch(rows, module, padding=padding, trained=trained, ahead=False)
    return args, kept
