"""What a micro-batch's routes cost in a trainer before its forward: its own code, and the same as docs/trainers edits it.

    SKYRL_DIR=... .venv/bin/python -m benchmarks.trainers

SkyRL's `setup_per_microbatch_replay_forward`, as it is (routes of each layer to Megatron's replay objects) and edited (stamp,
layout, checks, `mrr.microbatch`), in turns in one process: CPU seconds of a packed micro-batch of two samples.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import megatron_router_replay as mrr
from benchmarks.measure import Ratio, environment, ratio, rounds, table
from megatron_router_replay.testing import ParallelSizes, build_tiny_gpt, tiny_gpt_config
from tests.support.one_rank import only_rank
from tests.trainers import skyrl
from tests.trainers.stand_ins import trainer_imports

TOKENS, LAYERS, EXPERTS = 2048, 24, 128
REPEATS = 40


def loaded(folder: Path) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return SkyRL's functions from a folder; they keep what they imported."""
    with trainer_imports(str(folder), skyrl.SOURCE.packages, services=skyrl.SERVICES):
        from skyrl.backends.skyrl_train.distributed.megatron.token_metadata import build_token_metadata_layout
        from skyrl.backends.skyrl_train.utils.replay_utils import setup_per_microbatch_replay_forward

        return setup_per_microbatch_replay_forward, build_token_metadata_layout


def built(topk: int, **options: Any) -> Any:
    sizes = ParallelSizes()
    config = tiny_gpt_config(
        sizes, num_layers=LAYERS, num_moe_experts=EXPERTS, moe_router_topk=topk, hidden_size=16, **options
    )
    return build_tiny_gpt(config, sizes, vocab_size=64, core_attention="small")[0]


def measure(topk: int, folders: tuple[Path, Path]) -> list[str]:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.global_router_replay_instances.clear()  # SkyRL takes all routers of the process for the model's
    theirs, lay_out = loaded(folders[0])
    ours, _ = loaded(folders[1])
    own_chunk, chunk = built(topk, moe_enable_routing_replay=True), built(topk)
    generator = np.random.default_rng(0)
    routes = generator.random((2, TOKENS, LAYERS, EXPERTS)).argpartition(topk, axis=3)[..., :topk]
    indices = torch.from_numpy(routes.astype(np.uint8))
    sequences = torch.randint(1, 64, (2, TOKENS))
    attention = torch.ones(2, TOKENS, dtype=torch.bool)
    given: dict[str, Any] = {"remove_microbatch_padding": True}
    given["metadata_layout"] = lay_out(attention, torch.device("cpu"), packed=True, fp8_enabled=False)

    kept: list[Any] = []  # a session that nobody keeps is lost

    def opened() -> None:
        mrr.close_sessions(chunk)
        kept[:] = [mrr.replay(chunk)]

    seconds = rounds(
        {
            "theirs": lambda: theirs(
                indices, ~attention, attention, model=own_chunk, model_config=own_chunk.config, **given
            ),
            "ours": lambda: ours(
                indices, ~attention, attention, sequences, model=chunk, model_config=chunk.config, **given
            ),
        },
        repeats=REPEATS,
        prepare={"ours": opened},
    )
    mrr.close_sessions(chunk)
    of_theirs: Ratio = ratio(seconds, "ours", "theirs")
    medians = [f"{np.median(seconds[name]) * 1e3:.1f}" for name in ("theirs", "ours")]
    return [f"top-{topk}", *medians, str(of_theirs)]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, only_rank():
        folders = skyrl.SOURCE.unedited(Path(folder, "unedited")), skyrl.SOURCE.edited(Path(folder, "edited"))
        ParallelSizes().initialize()
        rows = [measure(topk, folders) for topk in (2, 8)]
    print(
        f"{environment()}. SkyRL {skyrl.SOURCE.commit()}; 2 x {TOKENS} tokens, {LAYERS} layers of {EXPERTS} experts.\n"
    )
    print(table(["routes", "SkyRL's own, ms", "edited, ms", "edited / own (95 %)"], rows))


if __name__ == "__main__":
    assert "SKYRL_DIR" in os.environ, "SKYRL_DIR names no checkout of SkyRL"
    main()
