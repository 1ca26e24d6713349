"""Seeds for tests of random cases that draw new ones in every run."""

import os
import random


def new_seeds(num: int, *, num_of_all: int) -> range:
    """Return seeds that no run had before, and print how to have them again.

    Args:
        num: of them in an ordinary run; FIRST_SEED=<what was printed> repeats them.
        num_of_all: with CI_ALL=1.
    """
    if os.environ.get("CI_ALL") == "1":
        num = num_of_all
    first = int(os.environ.get("FIRST_SEED") or random.SystemRandom().randrange(1000, 1 << 40))
    print(f"{num} random cases; FIRST_SEED={first} repeats them")
    return range(first, first + num)
