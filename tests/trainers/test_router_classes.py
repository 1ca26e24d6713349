"""The router classes of Megatron-Bridge and miles, from their files, unedited: exact, or refused by name."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any  # names of the files

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

import megatron_router_replay as mrr
from megatron_router_replay.errors import UnsupportedRouterError
from megatron_router_replay.trainers.seams import source_of
from tests.trainers.sources import Source
from tests.unit.mcore.tiny_chunk import (
    EXPERTS,
    HIDDEN,
    Chunk,
    disturbed_backward,
    flips,
    forward,
    num_recomputed,
    random_trace,
    reentrant,
    watched,
    wrong_replays,
)

pytestmark = pytest.mark.usefixtures("megatron")

BRIDGE, MILES = Source(name="megatron_bridge", packages=()), Source(name="miles", packages=())
MODELS = "src/megatron/bridge/models"
FILES = {
    "Gemma4TopKRouter": (f"{MODELS}/gemma/modeling_gemma4.py", "_gemma4_rms_norm _mark_sequence_parallel_parameter"),
    "MiniMaxM3TopKRouter": (f"{MODELS}/minimax_m3/minimax_m3_bridge.py", ""),
    "LoRATopKRouter": ("src/megatron/bridge/peft/lora_layers.py", ""),
    "AdapterWrapper": ("src/megatron/bridge/peft/adapter_wrapper.py", ""),
    "InklingRouter": ("miles_plugins/models/inkling/layers.py", ""),
}
"""Class -> its file, and the functions of it that the class calls."""


def read(source: Source, name: str, **scope: Any) -> Any:
    """Return a class of a checkout, without the rest of its module."""
    file, functions = FILES[name]
    text = Path(source.folder(), file).read_text()
    scope |= {"torch": torch, "nn": nn, "Tensor": Tensor, "TopKRouter": TopKRouter}
    for each in (*functions.split(), name):
        found = source_of(text, each)
        assert found is not None, f"{file} has no {each}"
        exec(f"from __future__ import annotations\n{found}", scope)
    return scope[name]


def chunk_of(kind: Any) -> Chunk:
    """Return a chunk whose routers are of this class, or wrapped in it."""
    chunk = Chunk()
    chunk.around = reentrant
    for layer in chunk.layers:
        router = layer.router
        if not issubclass(kind, TopKRouter):
            layer.router = kind(router, nn.Linear(HIDDEN, EXPERTS, bias=False))
            layer.router.layer_number, layer.router.weight = router.layer_number, router.weight
            continue
        config = copy.copy(chunk.config)
        config.inkling = SimpleNamespace(n_shared_experts=1)
        layer.router = kind(config=config, pg_collection=_groups())
        layer.router.weight.data = router.weight.data
        layer.router.set_layer_number(router.layer_number)
    return chunk


def _groups() -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
    for name in ("tp", "cp", "tp_cp", "tp_dp_cp"):
        setattr(groups, name, None)
    return groups


@pytest.mark.parametrize("name", ["Gemma4TopKRouter", "MiniMaxM3TopKRouter", "LoRATopKRouter"])
def test_a_router_of_megatron_bridge_is_replayed_in_forwards_and_recomputes(name):
    scope = {"AdapterWrapper": read(BRIDGE, "AdapterWrapper")} if name == "LoRATopKRouter" else {}
    chunk, trace = chunk_of(read(BRIDGE, name, **scope)), random_trace(8)
    assert mrr.explain(chunk).replayable
    with watched(chunk) as seen, mrr.replay(chunk, trace, verify=True) as session:
        disturbed_backward(chunk, forward(chunk, session))
    assert (wrong_replays(seen, trace), num_recomputed(seen), flips(seen)) == (0, 3, 0)
    assert session.report.decisions["verified"] == 48


def test_inklings_router_is_refused_by_name():
    """Its forward selects by itself, and returns every second result from a cache."""
    with pytest.raises(UnsupportedRouterError, match=r"router class InklingRouter overrides TopKRouter\.forward"):
        mrr.replay(chunk_of(read(MILES, "InklingRouter")), random_trace(8))
