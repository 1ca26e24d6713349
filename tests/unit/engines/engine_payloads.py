"""Replies as each engine sends them, written from the engines' sources without the code under test."""

import base64
import io
import json
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from megatron_router_replay import engines

DATA = Path(__file__).parents[1] / "data" / "engine_captures"


def read_json(name):
    return json.loads((DATA / name).read_text())


def config(name):
    return read_json(f"configs/{name}.json")


def all_moe(num_layers, num_experts, topk=2):
    numbers = tuple(range(1, num_layers + 1))
    return engines.ModelRoutingInfo(
        num_layers=num_layers, moe_layer_numbers=numbers, num_experts=num_experts, topk=topk
    )


def routes(num_rows, layers, *, num_experts, topk, seed=0):
    """[num_rows, layers, topk] with distinct ids in each row, int64."""
    rng = np.random.default_rng(seed)
    return rng.random((num_rows, layers, num_experts)).argsort(axis=2)[:, :, :topk]


def with_dense(moe_routes, num_layers, moe_indices, filler=0):
    """Spread compact MoE layers over all hidden layers."""
    full = np.full((moe_routes.shape[0], num_layers, moe_routes.shape[2]), filler, moe_routes.dtype)
    full[:, moe_indices] = moe_routes
    return full


def tokens(n, seed=1):
    return np.random.default_rng(seed).integers(0, 50_000, n).tolist()


def usage(prompt, output):
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def npy_base64(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def read_npy(text):
    return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)


def int32_base64(array):
    flat = [int(x) for x in np.asarray(array).reshape(-1)]
    return base64.b64encode(struct.pack(f"<{len(flat)}i", *flat)).decode()


def vllm_output(array, prompt, output, *, prompt_array=None, finish_reason="length", request="r0"):
    """A Python RequestOutput with one CompletionOutput."""
    extra = {} if prompt_array is None else {"prompt_routed_experts": prompt_array}
    completion = SimpleNamespace(index=0, routed_experts=array, token_ids=output, finish_reason=finish_reason)
    return SimpleNamespace(request_id=request, prompt_token_ids=prompt, outputs=[completion], **extra)


def vllm_choice(rows, prompt, output, index=0, **more):
    fields = {"index": index, "token_ids": output, "prompt_token_ids": prompt, "routed_experts": npy_base64(rows)}
    return fields | {"finish_reason": "length"} | more


def response(prompt, output, *, ids=True, request="r", shared=None, **more):
    """A parsed response with one choice and its usage; `shared`: fields of the response."""
    one = {"index": 0, "finish_reason": "length", **more}
    one |= {"prompt_token_ids": prompt, "token_ids": output} if ids else {}
    return {"id": request, "choices": [one], "usage": usage(len(prompt), len(output)), **(shared or {})}


def sglang_result(array, num_prompt, output, *, request="a", finish="length", **meta):
    """A result of /generate."""
    fields = {"id": request, "finish_reason": {"type": finish}, "prompt_tokens": num_prompt}
    fields |= {"completion_tokens": len(output), "routed_experts": None if array is None else int32_base64(array)}
    return {"text": "", "output_ids": list(output), "meta_info": fields | meta}


def vllm_stream(rows, output, *, index=0, request="r", size=1):
    """The chunks of a generate stream of `size` tokens; the reason and the routes come with the last one."""
    chunks = []
    for begin in range(0, len(output), size):
        last = {"index": index, "token_ids": output[begin : begin + size], "finish_reason": None}
        chunks.append({"request_id": request, "choices": [last], "usage": None})
    last |= {"finish_reason": "length", "routed_experts": npy_base64(rows)}
    return chunks


def sglang_stream(rows, num_prompt, output, *, index=None, request="r", incremental=False, size=1):
    """The chunks of /generate: all ids so far, or the new ones, with the number of all so far."""
    chunks = []
    for begin in range(0, len(output), size):
        end = min(begin + size, len(output))
        meta = {"id": request, "prompt_tokens": num_prompt, "completion_tokens": end, "finish_reason": None}
        chunk = {"text": "", "output_ids": output[begin if incremental else 0 : end], "meta_info": meta}
        chunks.append(chunk | ({} if index is None else {"index": index}))
    reason = {"type": "length", "length": len(output)}
    meta |= {"finish_reason": reason, "routed_experts": int32_base64(rows)}
    return chunks


def tensor(rows, dtype="uint16", **more):
    """The dict of bytes of prime-rl and verifiers."""
    rows = np.ascontiguousarray(rows).astype(dtype)
    data = base64.b64encode(rows.tobytes()).decode()
    return {"data": data, "shape": list(rows.shape), "start": 0, "dtype": dtype} | more


def chat_choice(rows, prompt, output, index=0):
    """One choice of SGLang's chat endpoint with return_meta_info and return_token_ids."""
    meta = {"id": f"r{index}", "routed_experts": int32_base64(rows), "prompt_tokens": len(prompt)}
    fields = {"index": index, "message": {"role": "assistant", "content": "x"}, "finish_reason": "length"}
    ids = {"prompt_token_ids": prompt, "response_token_ids": output}
    return fields | ids | {"meta_info": meta | {"completion_tokens": len(output)}}


FORMS = {
    "vllm object": lambda rows, p, o, request="r": vllm_output(rows, p, o, request=request),
    "vllm completions": lambda rows, p, o, request="r": response(
        p, o, request=request, routed_experts=npy_base64(rows)
    ),
    "vllm without ids": lambda rows, p, o, request="r": response(
        p, o, request=request, ids=False, routed_experts=npy_base64(rows)
    ),
    "vllm prime-rl": lambda rows, p, o, request="r": response(
        p, o, request=request, routed_experts=tensor(rows, start=None)
    ),
    "vllm array": lambda rows, p, o: rows,
    "vllm npy text": lambda rows, p, o: npy_base64(rows),
    "sglang generate": lambda rows, p, o, request="r": sglang_result(rows, len(p), o, request=request),
    "sglang openai": lambda rows, p, o, request="r": response(
        p, o, request=request, ids=False, shared={"sglext": {"routed_experts": int32_base64(rows)}}
    ),
    "sglang meta_info": lambda rows, p, o, request="r": {"id": request, "choices": [chat_choice(rows, p, o)]},
    "sglang text": lambda rows, p, o: int32_base64(rows),
    "sglang array": lambda rows, p, o: rows.astype(np.int32),
    "sglang_jax generate": lambda rows, p, o, request="r": sglang_result(rows, len(p), o, request=request),
    "sglang_jax completions": lambda rows, p, o, request="r": response(
        p, o, request=request, ids=False, routed_experts=int32_base64(rows)
    ),
    "megatron request": lambda rows, p, o: {"prompt_tokens": p, "generated_tokens": o, "routing_indices": rows},
    "megatron array": lambda rows, p, o: rows,
    "array array": lambda rows, p, o: rows,
}
"""Engine and form -> its reply for (rows over all layers, which are all MoE, prompt, output[, request])."""


def decode(form, rows, prompt, output, *, model, **options):
    """Decode one form of a sample; `options` beyond the ids of both."""
    engine, reply = form.split()[0], FORMS[form](rows, prompt, output)
    options |= {"axes": ("token", "layer", "expert")} if engine == "array" else {}
    return getattr(engines, engine).decode(reply, model=model, **({"token_ids": prompt + output} | options))
