"""A folder of trace files by step, rank and part.

    <root>/step_000000012/rank_00003.json                          manifest of what rank 3 saved in step 12
    <root>/step_000000012/rank_00003_part_00000.safetensors        one trace file, see `format.py`

Each rank writes only its own names, so ranks need no lock. A part counts once its manifest names it: the file is complete
on disk first, then the manifest is replaced. A crash between the two loses that part and no other. The manifest is JSON:

    {"format": "megatron_router_replay.manifest", "version": 1, "step": 12, "rank": 3,
     "parts": [{"part": 0, "num_tokens": 4096, "layer_numbers": [2, 3]}, ...], "crc32": ...}

crc32 is of the same JSON without that entry, sorted keys and no spaces.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_router_replay.errors import StoreError
from megatron_router_replay.merge import merge_traces
from megatron_router_replay.store.atomic import naming, replacing, sync
from megatron_router_replay.store.file import load_trace, save_trace
from megatron_router_replay.store.format import canonical_json, load_json
from megatron_router_replay.trace import RoutingTrace

_FORMAT = "megatron_router_replay.manifest"
_STEP = re.compile(r"step_([0-9]{9,15})")
_RANK = re.compile(r"rank_([0-9]{5,9})\.json")
_MAX_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class StoredPart:
    """One part that a store holds."""

    step: int
    rank: int
    part: int
    num_tokens: int
    layer_numbers: tuple[int, ...]
    path: Path


class TraceStore:
    """Traces by (step, rank, part) under one folder; iterating yields every `StoredPart` in that order.

    Args:
        root: the folder; made when the first part is saved. One process at a time writes as one rank.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def __iter__(self) -> Iterator[StoredPart]:
        for step in self.steps():
            yield from self.parts(step)

    def save(self, trace: RoutingTrace, *, step: int, rank: int = 0, part: int | None = None) -> Path:
        """Save a part and return its path; it is in the store when this returns, or not at all.

        Args:
            part: by default the next one of this step and rank. One that exists is replaced, as a resumed run needs.

        Raises:
            StoreError: a number is negative, or the folder cannot be written.
        """
        if step < 0 or rank < 0 or (part is not None and part < 0):
            raise StoreError(f"cannot save step {step}, rank {rank}, part {part} under {self.root}: from 0, please.")
        folder = self._folder(step)
        with naming(folder, "save to"):
            folder.mkdir(parents=True, exist_ok=True)
            sync(folder.parent)
        manifest = self._manifest(step, rank)
        entries = {entry["part"]: entry for entry in _read_manifest(manifest, step, rank)} if manifest.exists() else {}
        number = max(entries, default=-1) + 1 if part is None else part
        # Taken out first: a crash while it is replaced must not leave the old entry with the new file.
        if entries.pop(number, None):
            _write_manifest(manifest, step, rank, list(entries.values()))
        path = save_trace(trace, self._path(step, rank, number))
        entries[number] = {
            "part": number,
            "num_tokens": trace.num_tokens,
            "layer_numbers": list(trace.layer_numbers),
        }
        _write_manifest(manifest, step, rank, [entries[n] for n in sorted(entries)])
        return path

    def steps(self) -> list[int]:
        """Return the steps that have a part, in order."""
        if not self.root.is_dir():
            return []
        with naming(self.root, "list"):
            found = [(match, path) for path in self.root.iterdir() if (match := _STEP.fullmatch(path.name))]
            return sorted(int(match[1]) for match, path in found if any(path.glob("rank_*.json")))

    def parts(self, step: int) -> list[StoredPart]:
        """Return what all ranks saved in a step, ordered by rank and part.

        Raises:
            StoreError: the store has no such step, or a manifest is damaged.
        """
        folder = self._folder(step)
        with naming(folder, "list"):
            names = [match for path in folder.iterdir() if (match := _RANK.fullmatch(path.name))]
        return sorted(
            StoredPart(
                step=step,
                rank=rank,
                part=entry["part"],
                num_tokens=entry["num_tokens"],
                layer_numbers=tuple(entry["layer_numbers"]),
                path=self._path(step, rank, entry["part"]),
            )
            for rank in (int(match[1]) for match in names)
            for entry in _read_manifest(self._manifest(step, rank), step, rank)
        )

    def load(
        self,
        part: StoredPart,
        *,
        layer_numbers: Sequence[int] | None = None,
        rows: slice | None = None,
        device: torch.device | str = "cpu",
    ) -> RoutingTrace:
        """Return one part, or a slice of it, as `load_trace` does.

        Raises:
            StoreError: as `load_trace`; the file is not the one that the manifest names.
        """
        whole = layer_numbers is None and rows is None
        trace = load_trace(part.path, layer_numbers=layer_numbers, rows=rows, device=device)
        if whole and (trace.num_tokens, trace.layer_numbers) != (part.num_tokens, part.layer_numbers):
            raise StoreError(
                f"cannot load {part.path}: it has {trace.num_tokens} tokens and layers {list(trace.layer_numbers)}, its "
                f"manifest says {part.num_tokens} and {list(part.layer_numbers)}. Was it copied from elsewhere?"
            )
        return trace

    def load_step(self, step: int, *, allow_gaps: bool = False, device: torch.device | str = "cpu") -> RoutingTrace:
        """Return one trace of all ranks' parts of a step; see `merge_traces`.

        Raises:
            StoreError: the store has no such step, or a file is damaged.
            TraceError: the parts contradict each other, or there is a gap.
        """
        return merge_traces([self.load(part, device=device) for part in self.parts(step)], allow_gaps=allow_gaps)

    def prune(self, *, keep_last: int | None = None, before: int | None = None) -> list[int]:
        """Remove old steps and return them; also what a crash left of an earlier prune or save in them.

        Args:
            keep_last: keep this many of the highest steps.
            before: remove steps below this one.

        Raises:
            StoreError: not exactly one of the two is given, or a file cannot be removed.
        """
        if (keep_last is None) == (before is None) or (keep_last or 0) < 0:
            raise StoreError(f"cannot prune {self.root}: give one of keep_last={keep_last} (>= 0) and before={before}.")
        if not self.root.is_dir():
            return []
        steps = self.steps()
        removed = steps[: max(0, len(steps) - keep_last)] if keep_last is not None else []
        removed = [step for step in steps if step < before] if before is not None else removed
        with naming(self.root, "prune"):
            for step in removed:
                # Renamed first, so that no reader finds half a step.
                self._folder(step).rename(self.root / f".pruned_{secrets.token_hex(8)}")
            sync(self.root)
            for path in self.root.glob(".pruned_*"):
                shutil.rmtree(path)
        return removed

    def _folder(self, step: int) -> Path:
        return self.root / f"step_{step:09d}"

    def _manifest(self, step: int, rank: int) -> Path:
        return self._folder(step) / f"rank_{rank:05d}.json"

    def _path(self, step: int, rank: int, part: int) -> Path:
        return self._folder(step) / f"rank_{rank:05d}_part_{part:05d}.safetensors"


def _write_manifest(path: Path, step: int, rank: int, parts: list[dict[str, Any]]) -> None:
    content = _identity(step, rank) | {"parts": parts}
    content["crc32"] = zlib.crc32(canonical_json(content))
    with naming(path, "save"), replacing(path) as temporary:
        temporary.write_text(json.dumps(content), encoding="ascii")


def _read_manifest(path: Path, step: int, rank: int) -> list[dict[str, Any]]:
    with naming(path, "load"):
        with path.open("rb") as file:
            encoded = file.read(_MAX_MANIFEST_BYTES)
        try:
            content = load_json(encoded)
            crc32 = content.pop("crc32")
            expected = _identity(step, rank)
            same = all(content[name] == expected[name] for name in expected)
            if not same or crc32 != zlib.crc32(canonical_json(content)):
                raise StoreError(f"it is not the manifest of step {step}, rank {rank}, or it was altered.")
            parts = content["parts"]
            for entry in parts:
                _check_entry(entry)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"it is no manifest ({type(error).__name__}: {str(error)[:200]}).") from None
    return list(parts)


def _identity(step: int, rank: int) -> dict[str, Any]:
    return {"format": _FORMAT, "version": 1, "step": step, "rank": rank}


def _check_entry(entry: dict[str, Any]) -> None:
    numbers = [entry["part"], entry["num_tokens"], *entry["layer_numbers"]]
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"a part is {str(entry)[:100]}")
