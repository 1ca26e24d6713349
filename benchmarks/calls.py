"""Calls of this package's functions in a step of a model of three layers: `python -m benchmarks.calls [--walks]`.

One rank, reentrant checkpoints, a followed micro-batch of two sequences; the second one, for the first compares all layers.
`--walks` prints the files that a step passes, in order of their first call.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import megatron_router_replay as mrr
from benchmarks.measure import table
from megatron_router_replay.mcore import RouterReplay, RouterReplayAction
from tests.support.one_rank import only_rank

Calls = Counter[tuple[str, str]]
"""(file, function) -> its calls."""


@contextmanager
def counted() -> Iterator[Calls]:
    """Count the calls of this package's functions in the block, without those that stand in for a GPU."""
    calls: Calls = Counter()

    def profile(frame: Any, event: str, argument: Any) -> None:
        path, name = frame.f_code.co_filename, frame.f_code.co_qualname
        file = path.split("/megatron_router_replay/")[-1]
        if event == "call" and file != path and not file.startswith("testing/") and not name.endswith(">"):
            calls[file, name] += 1

    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def session_steps() -> Iterator[tuple[str, Calls]]:
    """Yield the parts of a replay session, and their calls."""
    from tests.unit.mcore.tiny_chunk import Chunk, random_trace, reentrant, tokens

    ids = tokens()
    trace = random_trace(8, token_ids=ids.flatten(), sequence_lengths=[4, 4])
    chunk = Chunk()
    chunk.around = reentrant
    with counted() as calls:
        session = mrr.replay(chunk, trace, padding_token_ids=[], min_agreement=1e-6)
    yield "opening", calls
    chunk(ids).sum().backward()
    with counted() as calls:
        loss = chunk(ids).sum()
    yield "forward", calls
    with counted() as calls:
        loss.backward()
    yield "recompute", calls
    with counted() as calls:
        session.close()
    yield "close", calls


def drop_in_steps() -> Iterator[tuple[str, Calls]]:
    """Yield a forward of a driven RouterReplay, and its calls."""
    from tests.unit.mcore.tiny_chunk import Chunk, random_routes, reentrant, tokens

    chunk = Chunk()
    chunk.around = reentrant
    for router in chunk.routers:
        router.router_replay = RouterReplay()
    RouterReplay.set_replay_data(list(random_routes(8).unbind(1)))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    chunk(tokens())
    with counted() as calls:
        chunk(tokens())
    yield "drop-in forward", calls
    RouterReplay.clear_global_router_replay_action()


def main() -> None:
    rows = []
    with only_rank():
        mrr.install()
        for name, calls in (*session_steps(), *drop_in_steps()):
            files = list(dict.fromkeys(file for file, _ in calls))
            rows.append([name, str(calls.total()), str(len(calls)), str(len(files))])
            if "--walks" in sys.argv:
                print(f"{name}: {', '.join(files)}", flush=True)
        mrr.uninstall()
    print(table(["step", "calls", "functions", "files"], rows))


if __name__ == "__main__":
    main()
