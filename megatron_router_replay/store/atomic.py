"""Replace a file in one step, and say in each error which file could not be read or written."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from megatron_router_replay.errors import StoreError, TraceError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which takes the name `path` at the end.

    A process that is killed leaves the old file or the new one, and perhaps the temporary file. A symbolic link stays: the
    file that it leads to is replaced, and its mode is kept.

    Raises:
        StoreError: the name is that of a folder, a device, a pipe or a socket, or there is no folder for it.
    """
    path = Path(os.path.realpath(path))
    check_regular(path)
    if not path.parent.is_dir():
        raise StoreError(f"MRR501: there is no folder {path.parent}: make it first.")
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        # safetensors 0.8 makes files that only their owner can read: a new one gets the mode of any new file instead.
        temporary.touch()
        mode = (path if path.exists() else temporary).stat().st_mode
        temporary.unlink()
        yield temporary
        temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_regular(path: Path) -> None:
    """Raise StoreError unless `path` is a file or free: a pipe would block, and os.replace would destroy a device."""
    if path.is_dir():
        raise StoreError("MRR501: it is a folder: TraceStore(folder).load_step(step) loads the parts of a step.")
    if path.exists() and not path.is_file():
        raise StoreError("MRR501: it is a device, a pipe or a socket: a trace is saved and loaded as a file.")


def as_path(value: Any) -> Path:
    """Return a path; raise StoreError with the order of arguments, which is easily swapped, if `value` is none."""
    try:
        return Path(value)
    except TypeError:
        raise StoreError(
            f"MRR501: {type(value).__name__} is no path: the trace comes first, as in save_trace(trace, path); "
            "load_trace(path) takes the path alone."
        ) from None


@contextmanager
def naming(path: Path, verb: str) -> Iterator[None]:
    """Raise errors of the body as a StoreError that names the file and the attempt, as in "cannot save x.safetensors"."""
    try:
        yield
    # torch raises RuntimeError where a file cannot be mapped.
    except (OSError, ValueError, RuntimeError, SafetensorError, StoreError, TraceError) as error:
        cut = ". Was it copied whole?" if isinstance(error, SafetensorError) and verb != "save" else ""
        raise StoreError(f"MRR501: cannot {verb} {path}: {error}{cut}") from error
