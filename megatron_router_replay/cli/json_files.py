"""JSON files that someone else wrote -> values, or one sentence on what is wrong with them."""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatron_router_replay.errors import StoreError

_MAX_SHOWN = 12
_KINDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
"""What JSON calls a value."""


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
        StoreError: nothing lies there, and the message names the keys that there are; or what does is surely no payload: a
            server's error, JSON inside a text, a plain value.
    """
    content, walked = load_json(path), "its top"
    for part in key.split(".") if key else []:
        if isinstance(content, dict) and part in content:
            content = content[part]
        # At most 18 digits, more than any list has: int() of thousands of them raises.
        elif isinstance(content, list) and re.fullmatch("[0-9]{1,18}", part) and int(part) < len(content):
            content = content[int(part)]
        else:
            raise StoreError(
                f"MRR902: {path} has nothing at {key!r}: {part!r} is not at {walked}, {_what_is(content, part)}."
            )
        walked = part if walked == "its top" else f"{walked}.{part}"
    if isinstance(content, str):
        inner = content.lstrip()[:1]
        hint = " that holds JSON: it was encoded twice, so save the object itself" if inner in "{[" and inner else ""
        raise StoreError(f"MRR902: {path} holds a text{hint}, expected an object or a list.")
    if not isinstance(content, (dict, list)):
        raise StoreError(f"MRR902: {path} holds {_KINDS.get(type(content), 'null')}, expected an object or a list.")
    if isinstance(content, dict) and "choices" not in content and "meta_info" not in content:
        refusal = content.get("error") or content.get("detail")
        if refusal:
            text = refusal.get("message", refusal) if isinstance(refusal, dict) else refusal
            raise StoreError(f"MRR902: {path} holds an error of the server, no routes: {str(text)[:300]}")
        if isinstance(content.get("response"), (dict, list)) and not key:
            raise StoreError(
                f"MRR901: {path} holds its payload below a key: --key response reads it. It has {_shown(list(content))}."
            )
    return content


def _what_is(content: Any, wanted: str) -> str:
    if isinstance(content, dict):
        names = [str(name) for name in content]
        close = get_close_matches(wanted, names, n=1)
        return f"which has {_shown(names)}" + (f"; did you mean {close[0]!r}?" if close else "")
    if isinstance(content, list):
        return f"which is a list of {len(content)}: 0 is its first entry"
    return f"which is {_KINDS.get(type(content), 'null')}"


def _shown(names: list[str]) -> str:
    listed = ", ".join(repr(name[:60]) for name in names[:_MAX_SHOWN]) + (", ..." if len(names) > _MAX_SHOWN else "")
    return listed or "no keys"


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
