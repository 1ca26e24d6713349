"""Mutated payloads are decoded to what an independent reader finds in them, or raise RouterReplayError; nothing else.

`INPUTS` payloads in all, drawn anew by fixed seeds. No case may take `MAX_CASE_SECONDS` of the processor, allocate
`MAX_CASE_BYTES` more than there was before (the process gets no more address space), or leave memory behind.
"""

import base64
import contextlib
import copy
import io
import pickle
import random
import resource
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_router_replay import engines
from megatron_router_replay.errors import RouterReplayError
from tests.unit.engines.engine_payloads import int32_base64, npy_base64, routes, sglang_result, tokens, with_dense

pytestmark = pytest.mark.slow

INPUTS = 700_000
"""Payloads of this file, beside the 650,000 files and envelopes of `tests/unit/store/test_fuzz.py`. Scale it to run longer
or shorter."""

WIRE, JSON, STRUCTURE, ANY, LINES = (INPUTS * share // 100 for share in (40, 25, 20, 10, 5))
MAX_CASE_SECONDS = 2.0
MAX_CASE_BYTES = 512 << 20
MAX_GROWTH_KIB = 100 << 10

MODEL = engines.ModelRoutingInfo(num_layers=4, moe_layer_numbers=(1, 3, 4), num_experts=300, topk=3)
PROMPT, OUTPUT = tokens(6), tokens(5, seed=2)
S = 11
FULL = with_dense(routes(S - 1, 3, num_experts=300, topk=3), 4, [0, 2, 3])
COMPACT = FULL[:, [0, 2, 3]]


@contextlib.contextmanager
def bounded_case():
    """Fail if what runs inside takes long; errors of the package are its right to refuse."""
    begin = time.process_time()
    with contextlib.suppress(RouterReplayError):
        yield
    assert time.process_time() - begin < MAX_CASE_SECONDS


@pytest.fixture(autouse=True)
def bounded_memory():
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_CASE_BYTES, hard))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_KIB


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Flip, overwrite, cut, insert, repeat or move bytes; sometimes several times."""
    data = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(max(len(data), 1))
        span = rng.randrange(1, 40)
        kind = rng.randrange(7)
        if kind == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1 and data:
            data[at] = rng.randrange(256)
        elif kind == 2:
            del data[at : at + span]
        elif kind == 3:
            data[at:at] = rng.randbytes(span)
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


@pytest.mark.parametrize("where", ["bytes", "text"])
@pytest.mark.parametrize(
    ("engine", "text", "read"),
    [("vllm", npy_base64(FULL.astype(np.uint16)), read_npy), ("sglang", int32_base64(FULL), read_int32)],
)
def test_mutated_wire_payloads(engine, text, read, where):
    rng = random.Random(len(engine) + len(where))
    decode, decoded = getattr(engines, engine).decode, 0
    raw = base64.b64decode(text)
    for _ in range(WIRE // 4):
        if where == "bytes":
            mutated = base64.b64encode(mutate(raw, rng)).decode()
        else:
            mutated = mutate(text.encode(), rng).decode("latin-1")
        with bounded_case():
            trace = decode(mutated, model=MODEL, token_ids=PROMPT + OUTPUT)
            decoded += 1
            assert_decoded_right(trace, read(mutated), PROMPT + OUTPUT)
    assert WIRE // 4 // 400 < decoded < WIRE // 4 // 2  # both outcomes are met


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
JUNK += [
    ["ndarray", {"data": COMPACT.tolist(), "dtype": "int16"}],
    [{"version": "1", "start": 0, "end": 5}],
    10**4299,
    10**9000,
]


def paths(tree, path=()):
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from paths(value, (*path, key))


class Tree:
    """A result that is mutated many times: copied by pickle, its paths listed once."""

    def __init__(self, tree, find=paths):
        self.pickled = pickle.dumps(tree)
        self.paths = [path for path in find(tree) if path]

    def mutated(self, rng, times, change):
        """Return a copy with `times` changes; a path that an earlier change removed is left out."""
        tree = pickle.loads(self.pickled)
        for _ in range(times):
            path = rng.choice(self.paths)
            with contextlib.suppress(KeyError, IndexError, TypeError, AttributeError, ValueError):
                parent = tree
                for key in path[:-1]:
                    parent = parent[key]
                change(parent, path[-1], rng)
        return tree


def change_anything(parent, key, rng):
    kind = rng.randrange(4)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    elif kind == 2 and isinstance(parent[key], str):
        parent[key] = mutate(parent[key].encode(), rng).decode("latin-1")
    else:
        parent[key] = copy.deepcopy(rng.choice(JUNK))


def chunked(index, ids, text):
    """A vLLM generate stream of single tokens."""
    last = len(ids) - 1
    for i, token in enumerate(ids):
        choice = {"index": index, "token_ids": [token], "finish_reason": "stop" if i == last else None}
        choice |= {"routed_experts": text if i == last else None}
        yield {"request_id": "a", "choices": [choice], "usage": None}


def sglang_chunks(ids, incremental):
    for i in range(len(ids)):
        chunk = sglang_result(FULL, 6, ids[: i + 1])
        if i + 1 < len(ids):
            chunk["meta_info"] |= {"routed_experts": None, "finish_reason": None}
        yield chunk | {"output_ids": ids[i : i + 1] if incremental else ids[: i + 1]}


def responses():
    choice = {"index": 0, "token_ids": OUTPUT, "finish_reason": "length", "prompt_token_ids": PROMPT}
    text = npy_base64(FULL.astype(np.uint16))
    usage = {"prompt_tokens": 6, "completion_tokens": 5, "total_tokens": 11}
    spans = {"weight_versions": [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 5}]}
    ids = {"prompt_token_ids": PROMPT, "generation_token_ids": OUTPUT}
    wrapped = ["ndarray", {"data": COMPACT.tolist(), "dtype": "int16"}]
    yield "vllm", {"id": "a", "choices": [choice | spans | {"routed_experts": text}], "usage": usage}
    yield "vllm", {"id": "a", "choices": [choice | {"routed_experts": text, "index": i} for i in range(2)]}
    split = {"prompt_routed_experts": COMPACT[:6].tolist()}
    yield "vllm", split | {"choices": [choice | {"routed_experts": COMPACT[6:].tolist()}]}
    first = choice | {"token_ids": OUTPUT[:2], "finish_reason": None}
    yield (
        "vllm",
        [
            {"request_id": "a", "choices": [first]},
            {"request_id": "a", "choices": [choice | {"token_ids": OUTPUT[2:], "routed_experts": text}]},
        ],
    )
    yield "sglang", sglang_result(FULL, 6, OUTPUT)
    yield "sglang", [sglang_result(FULL, 6, OUTPUT, request=name) for name in "ab"]
    yield "sglang", list(sglang_chunks(OUTPUT, incremental=True))
    yield "sglang", {"choices": [{"index": 0}], "usage": usage, "sglext": {"routed_experts": int32_base64(FULL)}}
    yield "sglang_jax", {"choices": [{"index": 0, "routed_experts": int32_base64(FULL)}], "usage": usage}
    yield "megatron", [{"prompt_tokens": PROMPT, "generated_tokens": OUTPUT, "routing_indices": COMPACT.tolist()}]
    yield "megatron", {"choices": [{"index": 0, "moe_topk_indices": wrapped} | ids], "usage": usage}
    output = {"index": 0, "token_ids": OUTPUT, "routed_experts": COMPACT.tolist(), "finish_reason": "length"}
    yield "tensorrt_llm", {"request_id": 1, "prompt_token_ids": PROMPT, "outputs": [output]}


def test_mutated_json_responses():
    rng, kinds = random.Random(0), [(engine, Tree(response)) for engine, response in responses()]
    outcomes = {"decoded": 0, "refused": 0}
    for i in range(JSON):
        engine, response = kinds[i % len(kinds)]
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


SAMPLES = [(tokens(6 + i, seed=60 + i), tokens(5 - i, seed=70 + i)) for i in range(3)]
SAMPLE_ROUTES = [
    with_dense(routes(10, 3, num_experts=300, topk=3, seed=80 + i), 4, [0, 2, 3]) for i in range(len(SAMPLES))
]


def structures():
    """Results of several samples; what is mutated is their structure, never an id or a route."""
    texts = [npy_base64(array.astype(np.uint16)) for array in SAMPLE_ROUTES]
    raws = [int32_base64(array) for array in SAMPLE_ROUTES]
    prompts = [prompt for prompt, _ in SAMPLES]
    total = {"prompt_tokens": 21, "completion_tokens": 12, "total_tokens": 33}
    choices = [
        {"index": i, "finish_reason": "stop", "prompt_token_ids": p, "token_ids": o, "routed_experts": texts[i]}
        for i, (p, o) in enumerate(SAMPLES)
    ]
    alone = [
        {
            "id": f"r{i}",
            "choices": [choice | {"index": 0}],
            "usage": {"prompt_tokens": 6 + i, "completion_tokens": 5 - i},
        }
        for i, choice in enumerate(choices)
    ]
    yield "vllm", {"id": "r", "choices": choices, "usage": total}, {}
    yield "vllm", alone, {}
    replies = [sglang_result(SAMPLE_ROUTES[i], 6 + i, o, request=f"r{i}") for i, (_, o) in enumerate(SAMPLES)]
    yield "sglang", replies, {"prompt_token_ids": prompts}
    yield "sglang", [reply | {"index": i} for i, reply in enumerate(replies)], {"prompt_token_ids": prompts}
    streams = []
    for i, (_, output) in enumerate(SAMPLES):
        for j in range(len(output)):
            chunk = sglang_result(SAMPLE_ROUTES[i], 6 + i, output[: j + 1], request=f"r{i}") | {"index": i}
            if j + 1 < len(output):
                chunk["meta_info"] |= {"routed_experts": None, "finish_reason": None}
            streams.append(chunk | {"output_ids": output[j : j + 1]})
    yield "sglang", streams, {"prompt_token_ids": prompts}
    jax = [{"index": i, "finish_reason": "stop", "routed_experts": raw} for i, raw in enumerate(raws)]
    yield "sglang_jax", {"id": "r", "choices": jax}, {"token_ids": [p + o for p, o in SAMPLES]}
    megatron = [
        {"index": i, "prompt_token_ids": p, "generation_token_ids": o, "moe_topk_indices": array[:, [0, 2, 3]].tolist()}
        for i, ((p, o), array) in enumerate(zip(SAMPLES, SAMPLE_ROUTES))
    ]
    yield "megatron", {"choices": megatron, "usage": {"prompt_tokens": 8, "completion_tokens": 12}}, {}
    yield (
        "vllm",
        [c for i, (_, o) in enumerate(SAMPLES) for c in chunked(i, o, texts[i])],
        {"prompt_token_ids": prompts},
    )


KEPT = {"token_ids", "output_ids", "prompt_token_ids", "generation_token_ids", "routed_experts", "moe_topk_indices"}


def structure_paths(tree, path=()):
    """The paths of a tree that lie outside of ids and routes; those fields themselves may be dropped as a whole."""
    yield path
    if path and path[-1] in KEPT:
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from structure_paths(value, (*path, key))


def change_structure(parent, key, rng):
    kind = rng.randrange(5)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, list):
        parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(parent[key]))
    elif kind == 2 and isinstance(parent, list):
        other = rng.randrange(len(parent))
        parent[key], parent[other] = parent[other], parent[key]
    elif key not in KEPT:
        parent[key] = rng.choice([None, 0, 1, 2, 5, "r0", "r1", "stop", "abort"])
    else:
        parent[key] = None


def test_mutated_structures_never_give_a_sample_the_routes_of_another():
    """Chunks, choices and replies are lost, repeated, swapped or renumbered: what decodes has its own routes."""
    rng = random.Random(5)
    kinds = [(engine, Tree(result, structure_paths), options) for engine, result, options in structures()]
    wanted = {tuple(prompt + output): array[:, [0, 2, 3]] for (prompt, output), array in zip(SAMPLES, SAMPLE_ROUTES)}
    outcomes = {"decoded": 0, "refused": 0}
    for i in range(STRUCTURE):
        engine, result, options = kinds[i % len(kinds)]
        # sglang-jax's completions have no ids: a choice that is copied in place of another, with its index, is forged.
        # vLLM's chunks have no number: one that is lost and one that comes twice make up for each other, and their order
        # is that of their arrival.
        unnumbered = i % len(kinds) == len(kinds) - 1
        times = 1 if unnumbered or engine == "sglang_jax" else rng.randrange(1, 4)
        mutated = result.mutated(rng, times, change_structure)
        outcomes["refused"] += 1
        with bounded_case():
            trace = getattr(engines, engine).decode_batch(mutated, model=MODEL, **options)
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
    assert min(outcomes.values()) > STRUCTURE // 20, outcomes


KEYS = [
    "choices",
    "routed_experts",
    "token_ids",
    "meta_info",
    "sglext",
    "prompt_token_ids",
    "usage",
    "id",
    "index",
    "x",
]
KEYS += ["outputs", "finish_reason", "output_ids", "moe_topk_indices", "weight_versions", "routing_indices", "metadata"]


def arbitrary(rng, depth=0):
    """A tree of whatever JSON and python have."""
    kind = rng.randrange(11 if depth < 4 else 8)
    if kind < 8:
        scalars = [
            None,
            rng.random() < 0.5,
            rng.randrange(-9, 999),
            rng.getrandbits(80),
            rng.gauss(0, 1e9),
            "",
            b"\x93",
        ]
        scalars += [rng.randbytes(rng.randrange(20)), rng.randbytes(rng.randrange(20)).decode("latin-1"), "AAAAAAAA"]
        return rng.choice([*scalars, np.zeros((rng.randrange(3), 4, 3), np.int16), float("inf")])
    if kind == 8:
        return {rng.choice(KEYS): arbitrary(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [arbitrary(rng, depth + 1) for _ in range(rng.randrange(4))]


def test_arbitrary_values():
    rng, refused = random.Random(9), 0
    names = ["vllm", "sglang", "sglang_jax", "megatron", "tensorrt_llm", "transformers", "megatron_trace"]
    for _ in range(ANY):
        module, value = getattr(engines, rng.choice(names)), arbitrary(rng)
        refused += 1
        with bounded_case():
            if module is engines.megatron_trace:
                trace = module.decode(value if isinstance(value, list) else [value], model=MODEL)
            elif rng.random() < 0.5:
                trace = module.decode_batch(value, model=MODEL)
            else:
                trace = module.decode(value, model=MODEL, token_ids=rng.choice([None, [], [1], 5]))
            refused -= 1
            assert len(trace) == len(trace.replay_mask)
    assert refused > ANY // 2


def test_mutated_lines_of_megatrons_trace():
    lines = [
        {
            "step": step,
            "stage": "pre_dispatch",
            "block": "decoder",
            "layer": layer,
            "rank": 0,
            "num_tokens": 3,
            "topk": 3,
        }
        | {"top_indices": COMPACT[3 * step : 3 * step + 3, i].tolist()}
        for step in range(3)
        for i, layer in enumerate((0, 2, 3))
    ]
    rng, decoded, tree = random.Random(11), 0, Tree(lines)
    for _ in range(LINES):
        mutated = tree.mutated(rng, rng.randrange(1, 3), change_anything)
        with bounded_case():
            trace = engines.megatron_trace.decode(mutated, model=MODEL)
            decoded += 1
            want = [record["top_indices"] for record in mutated if record.get("block") != "mtp"]
            rows = [np.stack(want[i : i + 3], axis=1) for i in range(0, len(want), 3) if len(want[i])]
            assert np.array_equal(trace.topk_indices.numpy(), np.concatenate(rows))
    assert LINES // 100 < decoded < LINES // 2
