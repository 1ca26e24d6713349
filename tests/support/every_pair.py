"""Fewer cases than a product has, with all that two of its factors can do together."""

import os
from collections.abc import Sequence
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case", bound=tuple[object, ...])


def every_pair(cases: Sequence[Case]) -> list[Case]:
    """Return cases in which each two values meet that meet in any case; all cases with CI_ALL=1.

    The same ones in every run: always the first of those with the most pairs that did not meet before.
    """
    if os.environ.get("CI_ALL") == "1":
        return list(cases)
    pairs = [set(combinations(((place, repr(value)) for place, value in enumerate(case)), 2)) for case in cases]
    left, chosen = set().union(*pairs), []
    while left:
        best = max(range(len(cases)), key=lambda number: len(pairs[number] & left))
        left -= pairs[best]
        chosen.append(cases[best])
    return chosen
