"""What the fuzz of the decoders starts from, and how it is changed: payloads, their structure, trees of any values."""

import base64
import contextlib
import copy
import pickle

import numpy as np

from megatron_router_replay import engines
from tests.support.damaged_bytes import BYTES
from tests.unit.engines.engine_payloads import (
    FORMS,
    int32_base64,
    npy_base64,
    routes,
    sglang_result,
    sglang_stream,
    tokens,
    usage,
    vllm_stream,
    with_dense,
)

MODEL = engines.ModelRoutingInfo(num_layers=4, moe_layer_numbers=(1, 3, 4), num_experts=300, topk=3)
PROMPT, OUTPUT = tokens(6), tokens(5, seed=2)
S = 11
FULL = with_dense(routes(S - 1, 3, num_experts=300, topk=3), 4, [0, 2, 3])
COMPACT = FULL[:, [0, 2, 3]]
SAMPLES = [(tokens(6 + i, seed=60 + i), tokens(5 - i, seed=70 + i)) for i in range(3)]
SAMPLE_ROUTES = [
    with_dense(routes(10, 3, num_experts=300, topk=3, seed=80 + i), 4, [0, 2, 3]) for i in range(len(SAMPLES))
]


SPANS = {"weight_versions": [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 5}]}


def of(form, rows, **choice):
    """One sample in a form of `engine_payloads`, arrays as lists."""
    reply = FORMS[form](rows, PROMPT, OUTPUT)
    if choice:
        reply["choices"][0] |= choice
    return reply


def sglang_chat_stream():
    """Text, the end, and behind them sglext and the usage."""
    whole = {
        "sglext": {"routed_experts": int32_base64(FULL), "input_ids": PROMPT, "output_ids": [OUTPUT]},
        "usage": usage(6, 5),
    }
    ends = [{"index": 0, "delta": {}, "finish_reason": reason} for reason in (None, "length")]
    return [{"id": "r", "choices": [end]} for end in ends] + [
        {"id": "r", "choices": [], n: v} for n, v in whole.items()
    ]


def responses():
    """(engine, result of one or two samples of which every value may be mutated)."""
    words, counts = FULL.astype(np.uint16), {"input_token_len": 6, "generate_token_len": 5}
    ids = {"prompt_token_ids": PROMPT, "generation_token_ids": OUTPUT}
    choice = {"index": 0, "token_ids": OUTPUT, "finish_reason": "length", "prompt_token_ids": PROMPT}
    compact = choice | {"routed_experts": COMPACT.tolist()}
    yield "vllm", of("vllm completions", words, **SPANS)
    yield "vllm", {"id": "a", "choices": [choice | {"routed_experts": npy_base64(words), "index": i} for i in range(2)]}
    split = {"prompt_routed_experts": COMPACT[:6].tolist()}
    yield "vllm", split | {"choices": [choice | {"routed_experts": COMPACT[6:].tolist()}]}
    stream = vllm_stream(words, OUTPUT, size=2)
    stream[0]["choices"][0]["prompt_token_ids"] = PROMPT
    yield "vllm", stream
    yield "sglang", of("sglang generate", FULL)
    yield "sglang", [sglang_result(FULL, 6, OUTPUT, request=name) for name in "ab"]
    yield "sglang", sglang_stream(FULL, 6, OUTPUT, incremental=True)
    yield "sglang", of("sglang openai", FULL)
    yield "sglang_jax", of("sglang_jax completions", FULL)
    yield "megatron", [of("megatron request", COMPACT.tolist())]
    wrapped = {"moe_topk_indices": ["ndarray", {"data": COMPACT.tolist(), "dtype": "int16"}]}
    yield "megatron", {"choices": [{"index": 0} | wrapped | ids], "usage": usage(6, 5)}
    yield "tensorrt_llm", {"request_id": 1, "outputs": [compact]}
    yield "lmdeploy", choice | {"routed_experts": FULL.tolist()} | counts
    narrow = of("sglang generate", FULL)
    raw = base64.b64encode(FULL.astype("<u2").tobytes()).decode()
    narrow["meta_info"] |= {"routed_experts": raw, "routed_experts_dtype": "uint16"}
    yield "sglang", narrow
    yield "nemo_gym", of("nemo_gym item", FULL)
    yield "dynamo", of("dynamo reply", FULL)
    yield "vllm", of("vllm prime-rl", FULL)
    yield "sglang", of("sglang meta_info", FULL)
    yield "sglang", sglang_chat_stream()


def structures():
    """Results of several samples; what is mutated is their structure, never an id or a route."""
    prompts = {"prompt_token_ids": [prompt for prompt, _ in SAMPLES]}
    whole = [
        FORMS["vllm completions"](rows.astype(np.uint16), *ids, f"r{i}")
        for i, (rows, ids) in enumerate(zip(SAMPLE_ROUTES, SAMPLES))
    ]
    choices = [reply["choices"][0] | {"index": i} for i, reply in enumerate(whole)]
    yield "vllm", {"id": "r", "choices": choices, "usage": usage(21, 12)}, {}
    yield "vllm", whole, {}
    sent = [(i, rows, len(prompt), output) for i, (rows, (prompt, output)) in enumerate(zip(SAMPLE_ROUTES, SAMPLES))]
    replies = [sglang_result(rows, size, output, request=f"r{i}") for i, rows, size, output in sent]
    yield "sglang", replies, prompts
    yield "sglang", [reply | {"index": i} for i, reply in enumerate(replies)], prompts
    streams = [
        sglang_stream(rows, size, output, index=i, request=f"r{i}", incremental=True) for i, rows, size, output in sent
    ]
    yield "sglang", [chunk for stream in streams for chunk in stream], prompts
    choices = [
        {"index": i, "message": {}, "response_token_ids": output, "meta_info": {"routed_experts": int32_base64(rows)}}
        for i, rows, _, output in sent
    ]
    yield "sglang", {"id": "r", "choices": choices, "usage": usage(21, 12)}, prompts
    jax = [{"index": i, "finish_reason": "stop", "routed_experts": int32_base64(rows)} for i, rows, *_ in sent]
    yield "sglang_jax", {"id": "r", "choices": jax}, {"token_ids": [p + o for p, o in SAMPLES]}
    megatron = [
        {"index": i, "prompt_token_ids": p, "generation_token_ids": o, "moe_topk_indices": rows[:, [0, 2, 3]].tolist()}
        for i, (rows, (p, o)) in enumerate(zip(SAMPLE_ROUTES, SAMPLES))
    ]
    yield "megatron", {"choices": megatron, "usage": {"prompt_tokens": 8, "completion_tokens": 12}}, {}
    streams = [vllm_stream(rows.astype(np.uint16), output, index=i) for i, rows, _, output in sent]
    yield "vllm", [chunk for stream in streams for chunk in stream], prompts


def paths(tree, path=(), *, kept=()):
    """Yield every path of a tree; fields of these names as a whole."""
    yield path
    if path and path[-1] in kept:
        return
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from paths(value, (*path, key), kept=kept)


class Tree:
    """A result that is mutated many times: copied by pickle, its paths listed once."""

    def __init__(self, tree, *, kept=()):
        self.pickled = pickle.dumps(tree)
        self.paths = [path for path in paths(tree, kept=kept) if path]

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
    None, True, -1, 0, 3, 2**40, 1.5, float("nan"), "", "AAAA", "x" * 500, b"\x93NUMPY", [], [[]], [[[1]]], {}, {"a": 1},
    FULL.tolist(), [1, "2"], npy_base64(FULL.astype(np.uint8) % 7), {"routed_experts": "AAAA"}, "abort", [[None]],
    ["ndarray", {"data": COMPACT.tolist(), "dtype": "int16"}], [{"version": "1", "start": 0, "end": 5}], 10**4299, 10**9000,
]  # fmt: skip


def change_anything(parent, key, rng):
    kind = rng.randrange(4)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    elif kind == 2 and isinstance(parent[key], str) and parent[key]:
        parent[key] = rng.choice(BYTES)(rng, parent[key].encode()).decode("latin-1")
    else:
        parent[key] = copy.deepcopy(rng.choice(JUNK))


# Ids and routes: what is mutated is the structure outside of them; those fields may be dropped as a whole.
KEPT = {"token_ids", "output_ids", "prompt_token_ids", "generation_token_ids", "response_token_ids"}
KEPT |= {"routed_experts", "moe_topk_indices"}


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
    "choices", "routed_experts", "token_ids", "meta_info", "sglext", "prompt_token_ids", "usage", "id", "index", "x",
    "outputs", "finish_reason", "output_ids", "moe_topk_indices", "weight_versions", "routing_indices", "metadata", "data",
    "shape", "dtype", "start", "nvext", "engine_data", "response_token_ids", "message",
]  # fmt: skip


def arbitrary(rng, depth=0):
    """A tree of whatever JSON and python have."""
    kind = rng.randrange(11 if depth < 4 else 8)
    if kind < 8:
        scalars = [
            None, rng.random() < 0.5, rng.randrange(-9, 999), rng.getrandbits(80), rng.gauss(0, 1e9), "", b"\x93",
            rng.randbytes(rng.randrange(20)), rng.randbytes(rng.randrange(20)).decode("latin-1"), "AAAAAAAA",
        ]  # fmt: skip
        return rng.choice([*scalars, np.zeros((rng.randrange(3), 4, 3), np.int16), float("inf")])
    if kind == 8:
        return {rng.choice(KEYS): arbitrary(rng, depth + 1) for _ in range(rng.randrange(4))}
    return [arbitrary(rng, depth + 1) for _ in range(rng.randrange(4))]
