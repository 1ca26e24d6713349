"""What the fuzz of the decoders starts from, and how it is changed: payloads, their structure, trees of any values."""

import contextlib
import copy
import pickle
import random

import numpy as np

from megatron_router_replay import engines
from tests.unit.engines.engine_payloads import int32_base64, npy_base64, routes, sglang_result, tokens, with_dense

MODEL = engines.ModelRoutingInfo(num_layers=4, moe_layer_numbers=(1, 3, 4), num_experts=300, topk=3)
PROMPT, OUTPUT = tokens(6), tokens(5, seed=2)
S = 11
FULL = with_dense(routes(S - 1, 3, num_experts=300, topk=3), 4, [0, 2, 3])
COMPACT = FULL[:, [0, 2, 3]]
SAMPLES = [(tokens(6 + i, seed=60 + i), tokens(5 - i, seed=70 + i)) for i in range(3)]
SAMPLE_ROUTES = [
    with_dense(routes(10, 3, num_experts=300, topk=3, seed=80 + i), 4, [0, 2, 3]) for i in range(len(SAMPLES))
]


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
