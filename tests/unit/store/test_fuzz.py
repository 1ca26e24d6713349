"""Damaged files: each is read correctly or raises RouterReplayError, in little time and memory.

The damage is new in each run, which prints the first seed: FIRST_SEED=<it> repeats it. CI_ALL=1 damages three times as many.
"""

import multiprocessing
import random
import resource
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_router_replay import RouterReplayError
from megatron_router_replay.store import TraceStore, load_trace, save_trace
from tests.support.damaged_bytes import BYTES
from tests.support.new_seeds import new_seeds
from tests.unit.store import damage
from tests.unit.store.store_traces import assert_same, assert_valid, full_trace, make_trace

NUM_PROCESSES = 2
MAX_CPU_SECONDS = 2.0
"""Of one case; of the processor, so that others on the machine do not count."""
MAX_GROWTH_MB = 200
"""Of the most memory that a process ever held, so a bound for each case."""

TRACES = [
    make_trace(3),
    full_trace(6),
    full_trace(4, num_experts=300, layer_numbers=(1,)),
    make_trace(0),
    make_trace(2, layer_numbers=()),
]


def max_memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run(cases, decode) -> Counter:
    """Decode every (mutated, original trace or None if checksums were made to fit); count what happened."""
    before, counts = max_memory_mb(), Counter()
    for mutated, original in cases:
        started = time.process_time()
        try:
            trace = decode(mutated)
        except RouterReplayError:
            counts["refused"] += 1
        else:
            if original is not None:
                assert_same(trace, original)
                counts["as it was"] += 1
            else:
                assert_valid(trace)
                counts["another valid trace"] += 1
        assert time.process_time() - started < MAX_CPU_SECONDS, mutated
    assert max_memory_mb() - before < MAX_GROWTH_MB
    return counts


def in_processes(fuzz, seeds) -> Counter:
    """Run fuzz(seeds) in processes of its own, whose memory nothing else has grown; add up what happened."""
    shares = [seeds[i::NUM_PROCESSES] for i in range(NUM_PROCESSES)]
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        counts = sum(pool.map(fuzz, shares), Counter())
    print(fuzz.__name__, dict(counts))
    assert sum(counts.values()) == len(seeds)
    return counts


def files(seeds) -> Counter:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        written = [(trace, save_trace(trace, path).read_bytes()) for trace in TRACES]
        kinds = [*BYTES, damage.edit_header, damage.edit_header, damage.flip_tensor, damage.flip_tensor]

        def cases():
            for seed in seeds:
                rng = random.Random(seed)
                trace, good = rng.choice(written)
                mutated = rng.choice([*kinds, damage.edit_length])(rng, good)
                yield (damage.sign(mutated), None) if rng.random() < 0.6 else (mutated, trace)

        def decode(data):
            path.write_bytes(data)
            return load_trace(path)

        return run(cases(), decode)


def parts_of_a_store(seeds) -> Counter:
    with tempfile.TemporaryDirectory() as folder:
        store, trace = TraceStore(folder, run="a"), full_trace(6)
        path = store.save(trace, step=1)
        good = path.read_bytes()

        def cases():
            for seed in seeds:
                rng = random.Random(seed)
                yield rng.choice([*BYTES, damage.edit_header])(rng, good), trace

        def decode(data):
            path.write_bytes(data)
            return store.load_step(1)

        return run(cases(), decode)


@pytest.mark.slow
def test_damage_with_checksums_that_fit_is_refused_or_makes_another_valid_trace():
    # Some must be valid, or the damage would not reach behind the checksums.
    seeds = new_seeds(30_000, num_of_all=100_000)
    assert in_processes(files, seeds)["another valid trace"] > len(seeds) / 200


@pytest.mark.slow
def test_damage_that_nobody_signed_is_never_another_trace():
    assert in_processes(parts_of_a_store, new_seeds(8_000, num_of_all=25_000))["another valid trace"] == 0


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data):
    with NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with pytest.raises(RouterReplayError):
            load_trace(file.name)
