"""Attach: a model takes `routing_rows` among its keyword arguments, so that the forward step needs no session.

mrr.attach(model_chunks)                                 # once, where the model is built
def forward_step(data_iterator, model):
    return model(**next(data_iterator)), loss_func       # with routing_rows in the batch, replay on or off
with mrr.replay(model_chunks, trace):                    # on
    forward_backward_func(forward_step_func=forward_step, ...)
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from megatron_router_replay.mcore.find import as_chunks, check_has_experts, find_routers, unwrap
from megatron_router_replay.mcore.session import Models, sessions_of
from megatron_router_replay.torch_private import not_compiled, surroundings

_ATTRIBUTE = "_router_replay_attached"


class Attached:
    """The hooks that `attach` put on model chunks.

    Args:
        modules: the innermost models.
        names: the keyword argument that carries rows, padding and trained positions.
    """

    def __init__(self, modules: list[nn.Module], names: dict[str, str]) -> None:
        self._names = names
        self._handles = {
            # In front of a session's own hook, which begins the micro-batch that this one queues.
            module: module.register_forward_pre_hook(self._take, with_kwargs=True, prepend=True)
            for module in modules
        }
        # Found once: a model has thousands of modules. A rebuilt decoder has other routers, whose session then raises.
        self._routers = WeakKeyDictionary({module: find_routers(module) for module in modules})
        for module in modules:
            setattr(module, _ATTRIBUTE, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Attached:
        return self  # a copy of the model has the hook too, and so is attached

    def remove(self) -> None:
        """Take the hooks off; the model refuses `routing_rows` again."""
        for module in list(self._handles):
            self.release(module)

    def release(self, module: nn.Module) -> None:
        """Take the hook off one of the models; of a copy of one, which came with a hook of its own, nothing."""
        if module in self._handles:
            self._handles.pop(module).remove()
            if getattr(module, _ATTRIBUTE, None) is self:
                delattr(module, _ATTRIBUTE)

    @not_compiled
    def _take(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        taken = {ours: kwargs[name] for ours, name in self._names.items() if kwargs.get(name) is not None}
        kept = {name: value for name, value in kwargs.items() if name not in self._names.values()}
        # A checkpoint around the whole chunk repeats the call with its arguments: that is no new forward.
        if taken and not surroundings().in_backward:
            if module not in self._routers:  # a copy
                self._routers[module] = find_routers(module)
            session = next(
                (session for found in self._routers[module] for session in sessions_of(found) if session.queued), None
            )
            if session is not None and "routing_rows" in taken:
                session.check_none_waits(module)
                session.microbatch(
                    taken["routing_rows"], module, padding=taken.get("padding"), trained=taken.get("trained")
                )
        return args, kept


def attach(
    model_chunks: Models,
    *,
    rows: str = "routing_rows",
    padding: str = "routing_padding",
    trained: str = "routing_trained",
) -> Attached:
    """Let the model's forward take routing rows as a keyword argument; once, where the model is built (again: anew).

    While a `replay` or `record` session is open on the model, each forward queues its rows with it; otherwise they are
    dropped. So `output = model(**batch)` is the whole forward step, and the `with` around the schedule turns replay on. It
    works through wrappers that pass keyword arguments on (DistributedDataParallel, Float16Module, torch.compile) and on
    every pipeline stage; stages without MoE layers drop the rows. A copy of the model is attached as the model is.

    Args:
        model_chunks: the model or its chunks on this rank.
        rows: the argument's name: the trace row of each position, of the shape of this rank's input_ids, -1 for none.
        padding: the name of an optional bool mask, True where a position is known to be padding.
        trained: the name of an optional mask, non-zero where a position is trained on and must have a route.

    Returns:
        An object whose `remove()` undoes it.

    Raises:
        LayoutError: a chunk has no experts.
    """
    chunks = as_chunks(model_chunks)
    check_has_experts(chunks, [find_routers(chunk) for chunk in chunks])
    modules = [unwrap(chunk) for chunk in chunks]
    for module in modules:
        earlier = getattr(module, _ATTRIBUTE, None)
        if earlier is not None:
            earlier.release(module)
    return Attached(modules, {"routing_rows": rows, "padding": padding, "trained": trained})
