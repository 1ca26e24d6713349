"""What moving routes costs, beside raw gloo, and a payload that no process could hold.

python -m benchmarks.transport                                # both parts; writes benchmarks/RESULTS_transport.md
python -m benchmarks.transport exchange                       # this part; the other's results stay
python -m benchmarks.transport streamed --gigabytes 5
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import environment
from benchmarks.transport.exchange import exchange
from benchmarks.transport.streamed import streamed

RESULTS = Path(__file__).parent.parent / "RESULTS_transport.md"
PARTS = {"exchange": "From traces to training ranks", "streamed": "Streamed"}


def main() -> None:
    """Run some parts or all, and write their sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], help="default: all")
    parser.add_argument("--gigabytes", type=float, help="of routes; default 0.6 for exchange, 61.5 for streamed")
    options = parser.parse_args()
    run: dict[str, Callable[[], str]] = {
        "exchange": lambda: exchange(options.gigabytes or 0.6),
        "streamed": lambda: streamed(options.gigabytes or 61.5),
    }
    for part in options.parts or PARTS:
        where, began = environment(), time.monotonic()
        text = run[part]()
        where += f"; {(time.monotonic() - began) / 60:.1f} minutes"
        print(f"## {PARTS[part]}\n\n{where}\n\n{text}\n", flush=True)
        write_results({PARTS[part]: f"{where}\n\n{text}"})


def write_results(sections: dict[str, str]) -> None:
    """Write RESULTS_transport.md: these sections anew, the others as they are there, in the order of PARTS."""
    kept: dict[str, str] = {}
    if RESULTS.exists():
        for text in RESULTS.read_text().split("\n## ")[1:]:
            title, _, rest = text.partition("\n")
            kept[title] = rest.strip()
    kept |= sections
    head = (
        "# Transport\n\nMade by `python -m benchmarks.transport`; a part that is run alone replaces its section alone. "
        "Rates of one table can be compared, also on a machine that others use: what is compared took turns. CPU seconds "
        "do not count who else runs."
    )
    order = [title for title in PARTS.values() if title in kept]
    RESULTS.write_text("\n\n".join([head, *(f"## {title}\n\n{kept[title]}" for title in order)]) + "\n")


if __name__ == "__main__":
    main()
