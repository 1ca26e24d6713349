"""The errors of the package: each message has the attempt, the values and the fix.

A message begins with the code of its cause, as in "MRR204: cannot split 6 positions over tp_size=4: not a multiple". The
code is part of the text at the `raise`, so a search for it finds both the places and its section of docs/errors.md.
"""

import re
from collections.abc import Sequence
from typing import Any

_CODE = re.compile(r"MRR\d{3}: ")


def listed(values: Sequence[Any]) -> str:
    """Return values for a message: eight of them and their number at most; of many integers the runs, "3 to 61"."""
    words = [str(value) for value in values]
    if len(values) > 8 and all(isinstance(value, int) for value in values):
        # Of 58 layers with one fault, their range is more useful than the first eight.
        starts = [i for i in range(len(values)) if i == 0 or values[i] != values[i - 1] + 1]
        runs = [(values[i], values[end - 1]) for i, end in zip(starts, [*starts[1:], len(values)])]
        words = [f"{first} to {last}" if last > first else str(first) for first, last in runs]
    return ", ".join(words[:8]) + (f", ... ({len(values)} in all)" if len(words) > 8 else "")


class RouterReplayError(Exception):
    """Base of every error that this package raises on purpose.

    `code` is the code of the cause, as "MRR204"; None if the message has none.
    """

    def __init__(self, message: str = "") -> None:
        # A caller that re-raises puts words in front ("cannot merge step 12: "); the code of the cause goes first.
        head, newline, rest = message.partition("\n")
        codes = _CODE.findall(head)
        super().__init__(codes[-1] + _CODE.sub("", head) + newline + rest if codes else message)

    @property
    def code(self) -> str | None:
        found = _CODE.match(str(self))
        return found[0][:-2] if found else None


class TraceError(RouterReplayError, ValueError):
    """A RoutingTrace cannot have these values, or two traces do not fit together."""


class PayloadError(RouterReplayError, ValueError):
    """An inference engine's reply cannot be read as the routes of its tokens."""


class LayoutError(RouterReplayError, ValueError):
    """Rows cannot be laid out, split or matched to tokens."""


class StoreError(RouterReplayError):
    """A file or directory of routes is damaged, incomplete or of another kind."""


class UnsupportedRouterError(RouterReplayError):
    """A router of this model cannot be replayed exactly; the message names the router and the config field."""


class ReplayStateError(RouterReplayError):
    """Forwards, recomputes and micro-batches did not match one to one."""


class ReplayDataError(ReplayStateError, ValueError):
    """Routes for another number of routers; a ValueError too, which Megatron-Core's own class raises."""


class SeamError(RouterReplayError):
    """A trainer's function, parameter or field that this package hooks is not as it is known; the message names it."""
