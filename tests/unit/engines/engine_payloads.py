"""Payloads as each engine version sends them, written from ENGINES' facts without the code under test."""

import base64
import io
import json
import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np

DATA = Path(__file__).parents[1] / "data" / "engine_captures"


def read_json(name):
    return json.loads((DATA / name).read_text())


def config(name):
    return read_json(f"configs/{name}.json")


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
