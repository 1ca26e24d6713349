"""Read the inputs of a model's forwards, and of those of the models around it, while a session is open."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

from torch import nn
from torch._compile import _disable_dynamo

from megatron_router_replay.mcore.batches.inputs import (
    TAKEN,
    ForwardInputs,
    has_own_forward,
    hidden_shape,
    positional_names,
    read_inputs,
)

PLANNED = ("forward", "build_schedule_plan")
"""Methods of a model that run its language model, or plan to."""


class WrappedMethod:
    """A method of a module that calls back before and after it runs, until `remove`.

    A direct call of the method counts, and every hook on the module has run by then. A copy of the module that is made
    before `remove` runs its own method, without the calls.

    Args:
        enter: gets the arguments and keywords of a call; returns whether `leave` shall be called when it ends.
        leave: gets `failed`, which is True if the call raised.
    """

    def __init__(
        self, module: nn.Module, name: str, enter: Callable[[Any, dict[str, Any]], bool], leave: Callable[[bool], None]
    ) -> None:
        self._module, self._name, self._replaced = module, name, vars(module).get(name)
        self._is_removed = False
        replaced = self._replaced
        # The class's method, or one that is bound to this instance: a copy of the model calls it with itself.
        is_method = replaced is None or getattr(replaced, "__self__", None) is module
        method: Any = getattr(type(module), name) if replaced is None else getattr(replaced, "__func__", replaced)

        @_disable_dynamo
        def begin(called: nn.Module, args: Any, kwargs: dict[str, Any]) -> bool:
            return called is module and not self._is_removed and enter(args, kwargs)

        @_disable_dynamo
        def end(failed: bool) -> None:
            leave(failed)

        def wrapped(called: nn.Module, *args: Any, **kwargs: Any) -> Any:
            is_entered, failed = begin(called, args, kwargs), True
            try:
                output = method(called, *args, **kwargs) if is_method else method(*args, **kwargs)
                failed = False
            finally:
                if is_entered:
                    end(failed)
            return output

        wrapped.__name__ = name
        # A bound method: copy.deepcopy binds it to the copy.
        self._bound = MethodType(wrapped, module)
        setattr(module, name, self._bound)

    def remove(self) -> None:
        """Put the former method back."""
        self._is_removed = True
        # A wrapper that was put around ours inside the session keeps it, and ours passes calls on.
        if vars(self._module).get(self._name) is self._bound:
            if self._replaced is None:
                delattr(self._module, self._name)
            else:
                setattr(self._module, self._name, self._replaced)


class ModelForwards:
    """The forwards of a model, from `wrap` to `unwrap`: it calls back with the inputs of each, and where it ends.

    A multimodal model gets the tokens, and its language model runs inside of its forward and gets embeddings. So the inputs
    of the models around the innermost one are kept while their forwards run, and one forward of it takes them.

    Args:
        levels: the model and the models that it wraps, outermost first.
        begin: gets the inputs of a forward of the innermost model, before its layers run.
        end: gets `failed`, after a forward that has begun.
        plan: gets the inputs of a call of `build_schedule_plan`, before its layers run; None: these are not read.
        is_new: returns whether a call of now is a forward to be read; False for a recompute.
    """

    def __init__(
        self,
        levels: Sequence[nn.Module],
        *,
        begin: Callable[[ForwardInputs], None],
        end: Callable[[bool], None],
        plan: Callable[[ForwardInputs], None] | None = None,
        is_new: Callable[[], bool],
    ) -> None:
        *around, self._module = levels
        # DistributedDataParallel and its like pass on all arguments, and name none.
        self._around = [each for each in around if "input_ids" in positional_names(type(each).forward)]
        self._begin, self._end, self._plan, self._is_new = begin, end, plan, is_new
        self._wrapped: list[WrappedMethod] = []
        self._decoder_hook: Any = None
        self._outer: list[ForwardInputs] = []  # of the forwards around the innermost model that run now
        self._awaits_decoder: ForwardInputs | None = None  # of a forward before its decoder runs

    def wrap(self) -> None:
        """Begin to read forwards."""
        for module in self._around:
            for name in PLANNED:
                if hasattr(type(module), name):
                    self._wrap(module, name, self._enter_outer, lambda failed: self._outer.pop())
        self._wrap(self._module, "forward", self._enter, self._leave)
        if self._plan is not None and hasattr(self._module, "build_schedule_plan"):
            self._wrap(self._module, "build_schedule_plan", self._enter_plan, lambda failed: None)
        decoder = getattr(self._module, "decoder", None)
        if has_own_forward(self._module) and isinstance(decoder, nn.Module):

            @_disable_dynamo
            def enter(called: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
                if called is decoder:  # not of a copy of the model
                    self._enter_decoder(args[0] if args else kwargs.get("hidden_states"))

            self._decoder_hook = decoder.register_forward_pre_hook(enter, with_kwargs=True)

    def _wrap(self, module: nn.Module, name: str, enter: Any, leave: Any) -> None:
        method = getattr(type(module), name)
        self._wrapped.append(
            WrappedMethod(module, name, lambda args, kwargs: enter(read_inputs(method, args, kwargs)), leave)
        )

    def unwrap(self) -> None:
        """Put the methods back."""
        for each in self._wrapped:
            each.remove()
        if self._decoder_hook is not None:
            self._decoder_hook.remove()
        self._wrapped, self._decoder_hook, self._outer, self._awaits_decoder = [], None, [], None

    def _enter_outer(self, inputs: ForwardInputs) -> bool:
        if inputs.input_ids is None:
            return False
        self._outer.append(inputs)
        return True

    def _with_outer(self, inputs: ForwardInputs) -> ForwardInputs:
        """Return the inputs with those of the innermost forward around this one, unless it embeds its own tokens."""
        is_embedded = inputs.hidden is None and getattr(self._module, "pre_process", True)
        if (is_embedded and inputs.input_ids is not None) or not self._outer:
            return inputs
        outer, self._outer[-1] = self._outer[-1], TAKEN
        return replace(inputs, outer=outer)

    def _enter(self, inputs: ForwardInputs) -> bool:
        if not self._is_new():
            return False
        inputs = self._with_outer(inputs)
        if self._decoder_hook is None:
            self._begin(inputs)
        else:
            self._awaits_decoder = inputs
        return True

    def _enter_decoder(self, hidden: Any) -> None:
        """Begin a forward of a model that may pack its tokens itself: only its decoder shows how."""
        inputs = self._awaits_decoder
        if inputs is None:
            return
        if inputs.input_ids is None or hidden_shape(self._module, hidden) != tuple(inputs.input_ids.shape):
            inputs = replace(inputs, hidden=hidden)
        self._begin(inputs)
        self._awaits_decoder = None  # not before: a forward that could not begin does not end, either

    def _leave(self, failed: bool) -> None:
        if self._awaits_decoder is not None:
            self._awaits_decoder = None  # its layers did not run
        else:
            self._end(failed)

    def _enter_plan(self, inputs: ForwardInputs) -> bool:
        if self._plan is not None and self._is_new():
            self._plan(self._with_outer(inputs))
        return False
