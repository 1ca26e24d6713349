"""Write a file so that it appears complete or not at all."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_router_replay.errors import StoreError, TraceError


@contextmanager
def new_file(folder: Path) -> Iterator[Path]:
    """Yield the path of a new, hidden file; what has no other name when the body ends is removed."""
    temporary = folder / f".{secrets.token_hex(8)}.tmp"
    try:
        temporary.touch(exist_ok=False)
    except FileNotFoundError:
        raise StoreError(f"MRR501: there is no folder {folder}: make it first.") from None
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file that takes the name `path` at the end, or vanishes on errors.

    Raises:
        StoreError: `path` is, or a link leads to, something that is no file; there is no such folder.
    """
    path = Path(os.path.realpath(path))  # a link stays, and what it leads to is replaced
    check_no_special_file(path)
    with new_file(path.parent) as temporary:
        yield temporary
        # Its bytes first: after a power failure the name must not lead to a file that is still empty.
        sync(temporary)
        os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Make this file, or new and changed names in this folder, last through a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_no_special_file(path: str | os.PathLike[str]) -> None:
    """Raise StoreError for a folder, and for a device, pipe or socket, which would be destroyed or waited for."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise StoreError("MRR501: it is a folder: TraceStore(folder).load_step(step) loads what ranks saved in a step.")
    if not stat.S_ISREG(mode):
        raise StoreError(
            "MRR501: it is no file but a device, a pipe or a socket: a trace is saved and loaded as a file."
        )


def as_path(value: Any) -> Path:
    """Return a path, or raise StoreError with the order of arguments, which is easily swapped."""
    try:
        return Path(value)
    except TypeError:
        raise StoreError(
            f"MRR501: {type(value).__name__} is no path: the trace comes first, as in save_trace(trace, path); "
            "load_trace(path) takes the path alone."
        ) from None


@contextmanager
def naming(path: Path, verb: str) -> Iterator[None]:
    """Turn what goes wrong in the body into a StoreError that says what was attempted with which file."""
    try:
        yield
    except (OSError, ValueError, StoreError, TraceError) as error:
        raise StoreError(f"MRR501: cannot {verb} {path}: {error}") from error
