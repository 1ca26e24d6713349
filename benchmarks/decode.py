"""How fast an engine's reply becomes a checked trace: a vLLM reply of the ids that a model of 128 experts routes to."""

from __future__ import annotations

import base64
import io
import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.measure import rounded, table
from megatron_router_replay import engines

TITLE = "Decode: a reply becomes a trace"
TOKENS, LAYERS, EXPERTS, TOPK = 8192, 48, 128, 8


def measure(tokens: int = TOKENS, repeats: int = 11) -> dict[str, Any]:
    """Return the bytes of the ids and the processor seconds of each repeat, by the dtype that is sent; one thread."""
    torch.set_num_threads(1)
    model = engines.ModelRoutingInfo(
        num_layers=LAYERS, moe_layer_numbers=tuple(range(1, LAYERS + 1)), num_experts=EXPERTS, topk=TOPK
    )
    scores = np.random.default_rng(0).random((tokens - 1, LAYERS, EXPERTS), dtype=np.float32)
    routes = scores.argpartition(TOPK, axis=2)[..., :TOPK]
    raw: dict[str, Any] = {}
    for dtype in (np.uint8, np.int16, np.int32):
        file = io.BytesIO()
        np.save(file, routes.astype(dtype))
        payload = base64.b64encode(file.getvalue()).decode()
        seconds = []
        for _ in range(repeats + 1):
            start = time.process_time()
            engines.vllm.decode(payload, model=model, token_ids=list(range(tokens)))
            seconds.append(rounded(time.process_time() - start))
        raw[dtype.__name__] = {"bytes": routes.size * np.dtype(dtype).itemsize, "seconds": seconds[1:]}  # 0 warms up
    return raw


def render(raw: dict[str, Any]) -> str:
    """Return the table."""
    rows = []
    for dtype, found in raw.items():
        seconds = statistics.median(found["seconds"])
        rows.append([dtype, f"{seconds * 1e3:.1f}", f"{found['bytes'] / seconds / 1e9:.2f}"])
    head = f"{TOKENS} tokens, {LAYERS} layers, top-{TOPK} of {EXPERTS}; medians, one thread, its processor time.\n\n"
    return head + table(["ids sent as", "ms", "GB of ids a second"], rows)
