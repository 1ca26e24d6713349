"""Checks of all rooms: integers, masks, the text of a value in a message, and warnings that users see."""

from __future__ import annotations

import functools
import inspect
import logging
import operator
import warnings
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from megatron_router_replay.errors import LayoutError, TraceError

P = ParamSpec("P")
R = TypeVar("R")

_LOG = logging.getLogger(__name__)


def as_integer(
    name: str,
    value: Any,
    *,
    least: int | None = None,
    most: int | None = None,
    error: Callable[[str], Exception] = TraceError,
) -> int:
    """Return an integer of any library as an int; floats, texts and bools are none.

    Args:
        name: of the value, for the message.
        least, most: the range, both ends included; None: no bound.
        error: makes the exception from the message.

    Raises:
        Exception: what `error` makes, if the value is no integer or lies outside the range.
    """
    try:
        # True is an integer for Python and for torch, but never meant as a number.
        is_bool = isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool
        number = None if is_bool else operator.index(value)
    except (TypeError, RuntimeError, ValueError):  # torch refuses some of its tensors by other errors
        number = None
    if number is None or (least is not None and number < least) or (most is not None and number > most):
        bounds = f" in {least}..{most}" if most is not None else "" if least is None else f" of {least} or more"
        raise error(f"MRR101: {name}={shown(value)} must be an integer{bounds}, got {type(value).__name__}.")
    return number


def shown(value: Any, length: int = 80) -> str:
    """Return how a value looks, cut to `length` characters."""
    try:
        return repr(value)[:length]
    except Exception:  # Python refuses to write integers of thousands of digits; a caller's class may do anything
        return f"a {type(value).__name__} that cannot be written out"


def as_integers(values: Any, name: str) -> Tensor:
    """Return integers given as a tensor, a numpy array or a list.

    Raises:
        LayoutError: they are no integers.
    """
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LayoutError(
            f"MRR201: {name} must be integers in a tensor or an array, got {type(values).__name__}: {error}"
        ) from error
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
        raise LayoutError(f"MRR201: {name} must be integers, got {list(tensor.shape)} {tensor.dtype}.")
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_meta:
        raise LayoutError(
            f"MRR201: {name} must be a plain tensor, got a {'nested' if tensor.is_nested else tensor.layout} one on "
            f"{tensor.device}: give [b, s], or [1, total] of a packed batch (nested.values().unsqueeze(0))."
        )
    return tensor


def as_mask(values: Any, name: str) -> Tensor:
    """Return a mask given as a tensor, a numpy array or a list, True where it is not zero.

    Raises:
        LayoutError: it is none of these.
    """
    try:
        return torch.as_tensor(values) != 0
    except (TypeError, ValueError, RuntimeError) as error:
        raise LayoutError(
            f"MRR201: {name} must be a mask in a tensor or an array, got {type(values).__name__}: {error}"
        ) from error


def check_options(function: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise if a call passes an option that a function does not have.

    Args:
        function: name of the called function, for the message.
        options: names of the keywords that the call passes.
        known: names of the keywords that the function has.

    Raises:
        TypeError: it has no such option; the message has the most similar one.
    """
    known = list(known)
    for name in options:
        if name not in known:
            similar = get_close_matches(name, known, n=1)
            suggestion = f". Did you mean {similar[0]!r}?" if similar else ""
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{suggestion}")


def with_checked_options(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function with a TypeError about an unknown option that names the most similar option."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        check_options(function.__name__, kwargs, known)
        return function(*args, **kwargs)

    return call


_warned: set[str] = set()
"""The causes that this process was warned of."""


def warn(cause: str, text: str, *, once: bool = False) -> None:
    """Log a warning, and show it once a process and cause: a library's log is invisible until a program configures logging.

    Args:
        once: log it once, too.
    """
    if not once or cause not in _warned:
        _LOG.warning("%s", text)
    if cause not in _warned:
        _warned.add(cause)
        warnings.warn(text, RuntimeWarning, stacklevel=2)
