"""Seeds for tests of random cases that draw new ones in every run."""

import os
import random
from collections import Counter
from collections.abc import Callable


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


def check_new_seeds(run: Callable[[int], str]) -> None:
    """Run 300 new random programs, 2,500 with CI_ALL=1, print how they ended, and raise if one failed."""
    failed, results = {}, Counter[str]()
    for seed in new_seeds(300, num_of_all=2500):
        try:
            results[run(seed)] += 1
        except Exception as error:  # of any kind: each is a failure, and the test names all of them
            failed[seed] = f"{type(error).__name__}: {error}"
    print(results)
    listed = "\n".join(f"seed {seed}: {text}" for seed, text in list(failed.items())[:20])
    assert not failed, f"{listed}\n{len(failed)} in all"
