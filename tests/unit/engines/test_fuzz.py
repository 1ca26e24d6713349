"""Mutated payloads are decoded to what an independent reader finds in them, or raise RouterReplayError; nothing else.

The payloads are new in each run, which prints the first seed: FIRST_SEED=<it> repeats them. CI_ALL=1 draws 100,000 in place
of 40,000. No case may take `MAX_CASE_SECONDS` of the processor, allocate `MAX_CASE_BYTES` more than there was before (the
process gets no more address space), or leave memory behind.
"""

import base64
import contextlib
import random
import resource
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_router_replay import engines
from megatron_router_replay.engines.registry import registered
from megatron_router_replay.errors import RouterReplayError
from tests.support.new_seeds import new_seeds
from tests.unit.engines.engine_payloads import npy_base64, read_npy
from tests.unit.engines.fuzz_inputs import (
    FULL,
    KEPT,
    MODEL,
    OUTPUT,
    PROMPT,
    SAMPLE_ROUTES,
    SAMPLES,
    S,
    Tree,
    arbitrary,
    change_anything,
    change_structure,
    responses,
    structures,
)

pytestmark = pytest.mark.slow

MAX_CASE_SECONDS = 2.0
MAX_CASE_BYTES = 512 << 20
MAX_GROWTH_KIB = 100 << 10


@contextlib.contextmanager
def bounded_case():
    """Fail if what runs inside takes long; errors of the package are its right to refuse."""
    begin = time.process_time()
    with contextlib.suppress(RouterReplayError):
        yield
    assert time.process_time() - begin < MAX_CASE_SECONDS


@pytest.fixture(autouse=True, scope="module")
def loaded():
    """What every decoder loads, torch above all, is no case's memory."""
    engines.vllm.decode(npy_base64(FULL.astype(np.uint16)), model=MODEL, token_ids=PROMPT + OUTPUT)


@pytest.fixture(autouse=True)
def bounded_memory(loaded):
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_CASE_BYTES, hard))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KIB


def read_int32(text):
    raw = base64.b64decode(text, validate=True)
    return np.array(struct.unpack(f"<{len(raw) // 4}i", raw)).reshape(-1, 4, 3)


def assert_decoded_right(trace, array, ids=None):
    """The trace holds the MoE columns of the mutated array, which has one row less than there are tokens."""
    array = np.asarray(array).astype(np.int64)
    rows = array[:, [0, 2, 3]]
    assert len(rows) == len(trace) - 1
    assert trace.replay_mask.tolist() == [True] * len(rows) + [False]
    assert np.array_equal(trace.topk_indices[: len(rows)].numpy(), rows)
    assert rows.min() >= 0
    assert rows.max() < 300
    assert all(len(set(route)) == 3 for row in rows.tolist() for route in row)
    if ids is not None:
        assert trace.token_ids.tolist() == ids


def test_mutated_json_responses():
    seeds, kinds = new_seeds(20_000, num_of_all=50_000), [(engine, Tree(response)) for engine, response in responses()]
    outcomes = {"decoded": 0, "refused": 0}
    for seed in seeds:
        rng = random.Random(seed)
        engine, response = rng.choice(kinds)
        mutated = response.mutated(rng, rng.randrange(1, 3), change_anything)
        outcomes["refused"] += 1
        with bounded_case():
            trace = getattr(engines, engine).decode_batch(mutated, model=MODEL)
            outcomes["refused"] -= 1
            outcomes["decoded"] += 1
            indices = trace.topk_indices.numpy()
            assert indices.min(initial=0) >= 0
            assert indices.max(initial=0) < 300
            ordered = np.sort(indices, axis=2)
            assert (ordered[:, :, 1:] != ordered[:, :, :-1]).all()
            assert sum(trace.sequence_lengths) == len(trace)
            if len(trace) == S and int(trace.replay_mask.sum()) == S - 1:
                check_against(engine, mutated, trace)
    assert min(outcomes.values()) > len(seeds) // 20, outcomes


def check_against(engine, mutated, trace):
    """Compare with an independent reading of the responses that have one array of routes."""
    if engine == "sglang" and isinstance(mutated, dict) and isinstance(mutated.get("meta_info"), dict):
        text, stated = (mutated["meta_info"].get(name) for name in ("routed_experts", "routed_experts_dtype"))
        if isinstance(text, str) and stated in (None, "int32"):
            assert_decoded_right(trace, read_int32(text))
    if engine == "vllm" and isinstance(mutated, dict) and not mutated.get("prompt_routed_experts"):
        item = mutated["choices"][0]
        text = item.get("routed_experts")
        if isinstance(text, str):
            ids = (
                item["prompt_token_ids"] + item["token_ids"]
                if item.get("prompt_token_ids") and item.get("token_ids")
                else None
            )
            assert_decoded_right(trace, read_npy(text), ids)


def test_mutated_structures_never_give_a_sample_the_routes_of_another():
    """Chunks, choices and replies are lost, repeated, swapped or renumbered: what decodes has its own routes."""
    seeds = new_seeds(16_000, num_of_all=40_000)
    kinds = [(engine, Tree(result, kept=KEPT), options) for engine, result, options in structures()]
    wanted = {tuple(prompt + output): array[:, [0, 2, 3]] for (prompt, output), array in zip(SAMPLES, SAMPLE_ROUTES)}
    outcomes = {"decoded": 0, "refused": 0}
    for seed in seeds:
        rng = random.Random(seed)
        engine, result, options = kind = rng.choice(kinds)
        # sglang-jax's completions have no ids: a choice that is copied in place of another, with its index, is forged.
        # vLLM's chunks have no number: one that is lost and one that comes twice make up for each other, and their order
        # is that of their arrival.
        unnumbered = kind is kinds[-1]
        times = 1 if unnumbered or engine == "sglang_jax" else rng.randrange(1, 4)
        mutated = result.mutated(rng, times, change_structure)
        outcomes["refused"] += 1
        with bounded_case():
            missing = rng.choice(["live", "raise", "raise"])  # a sample that is refused has no route then
            trace = getattr(engines, engine).decode_batch(mutated, model=MODEL, missing=missing, **options)
            outcomes["refused"] -= 1
            outcomes["decoded"] += 1
            for sample in trace.samples():
                if not sample.replay_mask.any():
                    continue
                if sample.token_ids is None:
                    # The ids of all were dropped and the counts are enough: whose tokens they are is then not said.
                    own = sample.topk_indices[:-1].numpy()
                    assert any(np.array_equal(own, rows) for rows in wanted.values()), (engine, mutated)
                    continue
                ids = sample.token_ids.tolist()
                if unnumbered:
                    ids = next((list(one) for one in wanted if sorted(one) == sorted(ids)), ids)
                rows = wanted.get(tuple(ids))
                assert rows is not None, (engine, mutated)
                assert np.array_equal(sample.topk_indices[:-1].numpy(), rows), (engine, mutated)
                assert sample.replay_mask.tolist() == [True] * len(rows) + [False]
    assert min(outcomes.values()) > len(seeds) // 20, outcomes


def test_arbitrary_values():
    seeds, refused = new_seeds(4_000, num_of_all=10_000), 0
    decoders = registered()
    for seed in seeds:
        rng = random.Random(seed)
        decoder, value = rng.choice(decoders), arbitrary(rng)
        refused += 1
        with bounded_case():
            if rng.random() < 0.5:
                trace = decoder.decode_batch(value, model=MODEL)
            else:
                trace = decoder.decode(value, model=MODEL, token_ids=rng.choice([None, [], [1], 5]))
            refused -= 1
            assert len(trace) == len(trace.replay_mask)
    assert refused > len(seeds) // 2
