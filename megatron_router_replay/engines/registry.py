"""Which engines there are: a file in `decoders/` each, and whatever else called `register`.

The command line, the documentation and the tests take their lists from here.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from megatron_router_replay.errors import PayloadError

if TYPE_CHECKING:
    from megatron_router_replay.engines.decoder import Decoder

_DECODERS: dict[str, Decoder] = {}
_PACKAGE = "megatron_router_replay.engines.decoders"

FILES = tuple(sorted(module.name for module in iter_modules([str(Path(__file__).parent / "decoders")])))
"""The engines of this package: the file `decoders/<name>.py` registers the decoder `<name>`."""


def register(decoder: Decoder) -> Decoder:
    """Add an engine, and return it.

    `mrr.engines.<name>` and `router-replay convert --engine <name>` then find it.

    Raises:
        PayloadError: another decoder has its name.
    """
    if decoder.name in _DECODERS:
        raise PayloadError(f"MRR101: an engine {decoder.name!r} is registered already: give the decoder another name.")
    _DECODERS[decoder.name] = decoder
    return decoder


def unregister(name: str) -> None:
    """Forget an engine that `register` added."""
    del _DECODERS[name]


def find(name: str) -> Decoder | None:
    """Return the decoder of a name; its file is loaded when somebody first asks for it."""
    if name in FILES:
        import_module(f"{_PACKAGE}.{name}")
    return _DECODERS.get(name)


def registered() -> list[Decoder]:
    """Return all decoders, in the order of their names."""
    for name in FILES:
        find(name)
    return [_DECODERS[name] for name in sorted(_DECODERS)]
