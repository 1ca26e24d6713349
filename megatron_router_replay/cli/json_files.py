"""JSON files that someone else wrote -> values, or one sentence on what is wrong with them."""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from megatron_router_replay.errors import StoreError

_MAX_SHOWN = 12


def load_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Raises:
        StoreError: it cannot be read, is no JSON, or is nested too deeply.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise StoreError(f"cannot read {path}: its JSON is nested too deeply.") from None
    except UnicodeDecodeError:
        raise StoreError(f"cannot read {path}: it is no text in UTF-8, so no JSON.") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path}: {error}.") from None


def at_key(content: Any, key: str, path: Path) -> Any:
    """Return what lies at a dotted key, such as response.choices or 0.response.

    Raises:
        StoreError: nothing lies there; the message names the keys that there are.
    """
    walked: list[str] = []
    for part in key.split(".") if key else []:
        where = ".".join(walked) or "its top"
        if isinstance(content, dict) and part in content:
            content = content[part]
        # At most 18 digits, more than any list has: int() of thousands of them raises.
        elif isinstance(content, list) and re.fullmatch("[0-9]{1,18}", part) and int(part) < len(content):
            content = content[int(part)]
        else:
            raise StoreError(f"{path} has nothing at {key!r}: {part!r} is not at {where}, {_what_is(content, part)}.")
        walked.append(part)
    return content


def _what_is(content: Any, wanted: str) -> str:
    if isinstance(content, dict):
        names = [str(name) for name in content]
        close = get_close_matches(wanted, names, n=1)
        return f"which has {shown(names)}" + (f"; did you mean {close[0]!r}?" if close else "")
    if isinstance(content, list):
        return f"which is a list of {len(content)}: 0 is its first entry"
    return f"which is {kind_of(content)}"


def shown(names: list[str]) -> str:
    """Return some names for a message."""
    listed = ", ".join(repr(name[:60]) for name in names[:_MAX_SHOWN]) + (", ..." if len(names) > _MAX_SHOWN else "")
    return listed or "no keys"


def kind_of(content: Any) -> str:
    """Return what JSON calls a value."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        int: "a number",
        float: "a number",
    }
    return names.get(type(content), "null")


def check_payload(content: Any, path: Path) -> None:
    """Refuse what is surely no payload, and say what it is.

    Raises:
        StoreError: a server's error, JSON inside a text, or a plain value.
    """
    if isinstance(content, str):
        inner = content.lstrip()[:1]
        hint = " that holds JSON: it was encoded twice, so save the object itself" if inner in "{[" and inner else ""
        raise StoreError(f"{path} holds a text{hint}, expected an object or a list.")
    if not isinstance(content, (dict, list)):
        raise StoreError(f"{path} holds {kind_of(content)}, expected an object or a list.")
    if isinstance(content, dict) and content.get("error") and "choices" not in content and "meta_info" not in content:
        error = content["error"]
        text = error.get("message", error) if isinstance(error, dict) else error
        raise StoreError(f"{path} holds an error of the server, no routes: {str(text)[:300]}")
    if isinstance(content, dict) and isinstance(content.get("detail"), (str, list)) and "choices" not in content:
        raise StoreError(f"{path} holds a refusal of the server, no routes: {str(content['detail'])[:300]}")


def load_token_ids(path: Path) -> list[list[int]]:
    """Return the token ids of a file: one list a sample.

    Raises:
        StoreError: anything else.
    """
    content = load_json(path)
    # `type`, not isinstance: true and false are integers to Python, and no token ids.
    right = (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(sample, list) and all(type(token) is int for token in sample) for sample in content)
    )
    if not right:
        what = "an empty list" if content == [] else "something else"
        if isinstance(content, list) and content and all(type(token) is int for token in content):
            what = "one flat list: put it into another list"
        raise StoreError(f"the token ids in {path} must be a list with one list of integers a sample; it is {what}.")
    flat = [token for sample in content for token in sample]
    if flat and not -(2**31) <= min(flat) <= max(flat) < 2**31:
        raise StoreError(f"the token ids in {path} reach {max(flat, key=abs)}, which no vocabulary has.")
    return list(content)
