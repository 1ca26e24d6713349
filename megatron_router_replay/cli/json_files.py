"""JSON files that someone else wrote -> values, or one sentence on what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_router_replay.errors import StoreError


def load_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        StoreError: it cannot be read, is no JSON, or is nested too deeply.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise StoreError(f"MRR902: cannot read {path}: its JSON is nested too deeply.") from None
    except UnicodeDecodeError:
        raise StoreError(f"MRR902: cannot read {path}: it is no text in UTF-8, so no JSON.") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"MRR902: cannot read {path}: {error}.") from None


def load_payload(path: Path, key: str) -> Any:
    """Return the payload at a dotted key of a JSON file, such as response.choices or 0.response.

    Raises:
        StoreError: nothing lies there, and the message names the keys that there are.
    """
    content = load_json(path)
    for part in key.split(".") if key else []:
        try:
            content = content[int(part) if isinstance(content, list) else part]
        except (LookupError, TypeError, ValueError):
            keys = ", ".join(repr(name[:60]) for name in [*content][:12]) if isinstance(content, dict) else ""
            there = f"a list of {len(content)}, from 0" if isinstance(content, list) else keys or "no keys"
            raise StoreError(f"MRR902: {path} has nothing at {key!r}: in place of {part!r} there is {there}.") from None
    return content


def load_token_ids(path: Path) -> list[list[int]]:
    """Return the token ids of a file: one list a sample.

    Raises:
        StoreError: anything else.
    """
    content = load_json(path)
    samples: list[Any] = content if isinstance(content, list) and content else [None]
    # `type`, not isinstance: true and false are integers to Python, and no token ids.
    if not all(isinstance(sample, list) and all(type(token) is int for token in sample) for sample in samples):
        flat = ", not one flat list" if all(type(token) is int for token in samples) else ""
        raise StoreError(f"MRR902: the token ids in {path} must be a list with one list of integers a sample{flat}.")
    most = max((token for sample in samples for token in sample), key=abs, default=0)
    if not -(2**31) <= most < 2**31:
        raise StoreError(f"MRR902: the token ids in {path} reach {most}, which no vocabulary has.")
    return samples
