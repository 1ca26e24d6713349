"""Write a file so that it appears complete or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megatron_router_replay.errors import StoreError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file in the same folder that takes the name `path` at the end, or vanishes if the body raises."""
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    # os.open, not tempfile: the file keeps the permissions that the umask gives, so that other users may read it.
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make new and changed names in this folder last through a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path, verb: str) -> Iterator[None]:
    """Turn what goes wrong in the body into a StoreError that says what was attempted with which file."""
    try:
        yield
    except (OSError, StoreError) as error:
        raise StoreError(f"cannot {verb} {path}: {error}") from error
