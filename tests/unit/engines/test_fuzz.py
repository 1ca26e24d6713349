"""Mutated payloads are decoded to what an independent reader finds in them, or raise RouterReplayError; nothing else.

73,000 mutated payloads in all: 12,000 of each of four wire forms, 20,000 JSON trees, 5,000 arbitrary values.
"""

import base64
import copy
import io
import resource
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_router_replay import engines
from megatron_router_replay.errors import RouterReplayError
from tests.unit.engines.engine_payloads import int32_base64, npy_base64, routes, sglang_result, tokens, with_dense

pytestmark = pytest.mark.slow

MODEL = engines.ModelRoutingInfo(num_layers=4, moe_layer_numbers=(1, 3, 4), num_experts=300, topk=3)
PROMPT, OUTPUT = tokens(6), tokens(5, seed=2)
S = 11
FULL = with_dense(routes(S - 1, 3, num_experts=300, topk=3), 4, [0, 2, 3])
WIRE = 12_000
JSON = 20_000
ANY = 5_000
MAX_GROWTH_KIB = 200 * 1024


@pytest.fixture(autouse=True)
def bounded_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KIB


def mutate(data: bytes, rng) -> bytes:
    """Flip, overwrite, cut, insert, repeat or move bytes; sometimes several times."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, max(len(data), 1)))
        span = int(rng.integers(1, 40))
        kind = rng.integers(0, 7)
        if kind == 0 and data:
            data[at] ^= 1 << int(rng.integers(0, 8))
        elif kind == 1 and data:
            data[at] = int(rng.integers(0, 256))
        elif kind == 2:
            del data[at : at + span]
        elif kind == 3:
            data[at:at] = rng.bytes(span)
        elif kind == 4:
            data[at:at] = data[at : at + span]
        elif kind == 5:
            del data[at:]
        else:
            data[at : at + span] = bytes(len(data[at : at + span]))
    return bytes(data)


def read_npy(text):
    return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)


def read_int32(text):
    raw = base64.b64decode(text, validate=True)
    return np.array(struct.unpack(f"<{len(raw) // 4}i", raw)).reshape(-1, 4, 3)


def assert_decoded_right(trace, array, ids=None):
    """The trace holds the MoE columns of the mutated array, whose ids are distinct experts."""
    array = np.asarray(array).astype(np.int64)
    rows = array[: len(trace) - 1][:, [0, 2, 3]]
    assert trace.replay_mask.tolist() == [True] * len(rows) + [False] * (len(trace) - len(rows))
    assert np.array_equal(trace.topk_indices[: len(rows)].numpy(), rows)
    assert rows.min() >= 0
    assert rows.max() < 300
    assert all(len(set(route)) == 3 for row in rows.tolist() for route in row)
    if ids is not None:
        assert trace.token_ids.tolist() == ids


@pytest.mark.parametrize("where", ["bytes", "text"])
@pytest.mark.parametrize(
    ("engine", "text", "read"),
    [("vllm", npy_base64(FULL.astype(np.uint16)), read_npy), ("sglang", int32_base64(FULL), read_int32)],
)
def test_mutated_wire_payloads(engine, text, read, where):
    rng = np.random.default_rng(len(engine) + len(where))
    decode, decoded = getattr(engines, engine).decode, 0
    for _ in range(WIRE):
        if where == "bytes":
            mutated = base64.b64encode(mutate(base64.b64decode(text), rng)).decode()
        else:
            mutated = mutate(text.encode(), rng).decode("latin-1")
        try:
            trace = decode(mutated, model=MODEL, token_ids=PROMPT + OUTPUT)
        except RouterReplayError:
            continue
        decoded += 1
        assert_decoded_right(trace, read(mutated), PROMPT + OUTPUT)
    assert 30 < decoded < WIRE // 2  # both outcomes are met


JUNK = [
    None,
    True,
    -1,
    0,
    3,
    2**40,
    1.5,
    float("nan"),
    "",
    "AAAA",
    "x" * 500,
    b"\x93NUMPY",
    [],
    [[]],
    [[[1]]],
    {},
    {"a": 1},
]
JUNK += [FULL.tolist(), [1, "2"], npy_base64(FULL.astype(np.uint8) % 7), {"routed_experts": "AAAA"}, "abort", [[None]]]


def paths(tree, path=()):
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from paths(value, (*path, key))


def mutate_tree(tree, rng):
    tree = copy.deepcopy(tree)
    for _ in range(rng.integers(1, 3)):
        every = [path for path in paths(tree) if path]
        if not every:
            return tree
        path = every[rng.integers(0, len(every))]
        parent = tree
        for key in path[:-1]:
            parent = parent[key]
        kind = rng.integers(0, 4)
        if kind == 0:
            del parent[path[-1]]
        elif kind == 1 and isinstance(parent, list):
            parent.insert(path[-1], copy.deepcopy(parent[path[-1]]))
        elif kind == 2 and isinstance(parent[path[-1]], str):
            parent[path[-1]] = mutate(parent[path[-1]].encode(), rng).decode("latin-1")
        else:
            parent[path[-1]] = copy.deepcopy(JUNK[rng.integers(0, len(JUNK))])
    return tree


def responses():
    choice = {"index": 0, "token_ids": OUTPUT, "finish_reason": "length", "prompt_token_ids": PROMPT}
    text = npy_base64(FULL.astype(np.uint16))
    usage = {"prompt_tokens": 6, "completion_tokens": 5}
    compact = FULL[:, [0, 2, 3]].tolist()
    yield "vllm", {"id": "a", "choices": [choice | {"routed_experts": text}], "usage": usage}
    yield "vllm", {"id": "a", "choices": [choice | {"routed_experts": text, "index": i} for i in range(2)]}
    yield "vllm", {"prompt_routed_experts": compact[:6], "choices": [choice | {"routed_experts": compact[6:]}]}
    yield (
        "vllm",
        [
            {"request_id": "a", "choices": [choice | {"token_ids": OUTPUT[:2]}]},
            {"request_id": "a", "choices": [choice | {"token_ids": OUTPUT[2:], "routed_experts": text}]},
        ],
    )
    yield "sglang", sglang_result(FULL, 6, OUTPUT)
    yield "sglang", [sglang_result(FULL, 6, OUTPUT, request=name) for name in "ab"]
    yield "sglang", {"choices": [{"index": 0}], "usage": usage, "sglext": {"routed_experts": int32_base64(FULL)}}
    yield "sglang_jax", {"choices": [{"index": 0, "routed_experts": int32_base64(FULL)}], "usage": usage}
    yield "megatron", [{"prompt_tokens": PROMPT, "generated_tokens": OUTPUT, "routing_indices": compact}]


def test_mutated_json_responses():
    rng, kinds = np.random.default_rng(0), list(responses())
    outcomes = {"decoded": 0, "refused": 0}
    for i in range(JSON):
        engine, response = kinds[i % len(kinds)]
        mutated = mutate_tree(response, rng)
        try:
            trace = getattr(engines, engine).decode_batch(mutated, model=MODEL)
        except RouterReplayError:
            outcomes["refused"] += 1
            continue
        outcomes["decoded"] += 1
        indices = trace.topk_indices.numpy()
        assert indices.min(initial=0) >= 0
        assert indices.max(initial=0) < 300
        ordered = np.sort(indices, axis=2)
        assert (ordered[:, :, 1:] != ordered[:, :, :-1]).all()
        assert sum(trace.sequence_lengths) == len(trace)
        if b"routed_experts" in repr(mutated).encode() and len(trace) == S and int(trace.replay_mask.sum()) == S - 1:
            check_against(engine, mutated, trace)
    assert min(outcomes.values()) > JSON // 20, outcomes


def check_against(engine, mutated, trace):
    """Compare with an independent reading of the responses that have one array of routes."""
    if engine == "sglang" and isinstance(mutated, dict) and isinstance(mutated.get("meta_info"), dict):
        text = mutated["meta_info"].get("routed_experts")
        if isinstance(text, str):
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


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=20)
KEYS = st.sampled_from(
    ["choices", "routed_experts", "token_ids", "meta_info", "sglext", "prompt_token_ids", "usage", "id", "x"]
)
TREES = st.recursive(SCALARS, lambda t: st.lists(t, max_size=4) | st.dictionaries(KEYS, t, max_size=4), max_leaves=12)


@settings(max_examples=ANY, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    TREES,
    st.sampled_from(["vllm", "sglang", "sglang_jax", "megatron"]),
    st.booleans(),
    st.sampled_from([None, [], [1], 5]),
)
def test_arbitrary_values(value, engine, batch, ids):
    module = getattr(engines, engine)
    try:
        options = {} if batch else {"token_ids": ids}
        trace = (module.decode_batch if batch else module.decode)(value, model=MODEL, **options)
    except RouterReplayError:
        return
    assert len(trace) == len(trace.replay_mask)
