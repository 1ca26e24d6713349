"""Payloads as each engine version sends them, written from ENGINES' facts without the code under test."""

import base64
import io
import json
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

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


def npy_base64(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def read_npy(text):
    return np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)


def int32_base64(array):
    flat = [int(x) for x in np.asarray(array).reshape(-1)]
    return base64.b64encode(struct.pack(f"<{len(flat)}i", *flat)).decode()


def vllm_output(array, prompt, output, *, prompt_array=None, finish_reason="length", index=0):
    """A python RequestOutput with one CompletionOutput."""
    extra = {} if prompt_array is None else {"prompt_routed_experts": prompt_array}
    completion = SimpleNamespace(index=index, routed_experts=array, token_ids=output, finish_reason=finish_reason)
    return SimpleNamespace(request_id="r0", prompt_token_ids=prompt, outputs=[completion], **extra)


def sglang_result(array, prompt_tokens, output, *, request="a", finish="length"):
    meta = {"id": request, "finish_reason": {"type": finish}, "prompt_tokens": prompt_tokens}
    meta |= {"completion_tokens": len(output), "routed_experts": None if array is None else int32_base64(array)}
    return {"text": "", "output_ids": list(output), "meta_info": meta}


def tokens(n, seed=1):
    return np.random.default_rng(seed).integers(0, 50_000, n).tolist()


def usage(prompt, output):
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def envelope(rows, dtype="int16"):
    """NeMo Gym's text."""
    text = base64.b64encode(np.ascontiguousarray(rows).astype(dtype).tobytes()).decode()
    return f"nrlre1:{dtype}:{'x'.join(map(str, np.shape(rows)))}:{text}"


def response(prompt, output, request, *, ids=True, shared=None, **more):
    """A parsed response with one choice and its usage; `shared`: fields of the response."""
    one = {"index": 0, "finish_reason": "length", **more}
    one |= {"prompt_token_ids": prompt, "token_ids": output} if ids else {}
    return {"id": request, "choices": [one], "usage": usage(len(prompt), len(output)), **(shared or {})}


def choice_of(rows, prompt, output, index=0, **more):
    """One choice of vLLM's, with its ids and routes."""
    fields = {"index": index, "token_ids": output, "prompt_token_ids": prompt, "routed_experts": npy_base64(rows)}
    return fields | more


def vllm_object(rows, prompt, output, request="r0"):
    result = vllm_output(rows, prompt, output)
    result.request_id = request
    return result


def vllm_stream(rows, output, *, index=0, request="r", size=1):
    """The chunks of a generate stream of `size` tokens; the reason and the routes come with the last one."""
    chunks = []
    for begin in range(0, len(output), size):
        last = {
            "index": index,
            "token_ids": output[begin : begin + size],
            "finish_reason": None,
            "routed_experts": None,
        }
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
    """The dict of bytes of prime-rl, verifiers and dynamo."""
    rows = np.ascontiguousarray(rows).astype(dtype)
    return {
        "data": base64.b64encode(rows.tobytes()).decode(),
        "shape": list(rows.shape),
        "start": 0,
        "dtype": dtype,
    } | more


def dynamo_reply(routed_experts, prompt, output, request="r"):
    data = {"prompt_token_ids": prompt, "completion_token_ids": output, "routed_experts": routed_experts}
    return response(prompt, output, request, ids=False, shared={"nvext": {"engine_data": data}})


FORMS = {
    "vllm object": vllm_object,
    "vllm completions": lambda rows, p, o, request="r": response(p, o, request, routed_experts=npy_base64(rows)),
    "vllm without ids": lambda rows, p, o, request="r": response(
        p, o, request, ids=False, routed_experts=npy_base64(rows)
    ),
    "vllm prime-rl": lambda rows, p, o, request="r": response(p, o, request, routed_experts=tensor(rows, start=None)),
    "vllm array": lambda rows, p, o: rows,
    "vllm npy text": lambda rows, p, o: npy_base64(rows),
    "sglang generate": lambda rows, p, o, request="r": sglang_result(rows, len(p), o, request=request),
    "sglang openai": lambda rows, p, o, request="r": response(
        p, o, request, ids=False, shared={"sglext": {"routed_experts": int32_base64(rows)}}
    ),
    "sglang text": lambda rows, p, o: int32_base64(rows),
    "sglang array": lambda rows, p, o: rows.astype(np.int32),
    "sglang_jax generate": lambda rows, p, o, request="r": sglang_result(rows, len(p), o, request=request),
    "sglang_jax completions": lambda rows, p, o, request="r": response(
        p, o, request, ids=False, routed_experts=int32_base64(rows)
    ),
    "sglang meta_info": lambda rows, p, o, request="r": response(
        p, o, request, message={}, response_token_ids=o, meta_info={"routed_experts": int32_base64(rows)}
    ),
    "dynamo reply": lambda rows, p, o, request="r": dynamo_reply(tensor(rows, start=None), p, o, request),
    "megatron request": lambda rows, p, o: {"prompt_tokens": p, "generated_tokens": o, "routing_indices": rows},
    "megatron array": lambda rows, p, o: rows,
    "tensorrt_llm object": vllm_object,
    "tensorrt_llm choice": lambda rows, p, o: SimpleNamespace(
        index=0, token_ids=o, finish_reason="length", routed_experts=torch.from_numpy(rows.astype(np.int32))
    ),
    "lmdeploy object": lambda rows, p, o: SimpleNamespace(
        token_ids=o, input_token_len=len(p), generate_token_len=len(o), routed_experts=rows, index=0
    ),
    "nemo_gym item": lambda rows, p, o: {
        "prompt_token_ids": p, "generation_token_ids": o, "routed_experts": envelope(rows)
    },
    "transformers hooks": lambda rows, p, o: {
        n + 1: torch.from_numpy(np.ascontiguousarray(rows[:, n])) for n in range(rows.shape[1])
    },
    "array array": lambda rows, p, o: rows,
}  # fmt: skip
"""engine and form -> what it sends of (rows over all layers, which are all MoE, prompt, output[, request])."""


def decode(form, rows, prompt, output, *, model, **options):
    """Decode one form of a sample; `options` beyond the ids of both."""
    engine, what = form.split()[0], FORMS[form](rows, prompt, output)
    options |= {"axes": ("token", "layer", "expert")} if engine == "array" else {}
    return getattr(engines, engine).decode(what, model=model, **({"token_ids": prompt + output} | options))
