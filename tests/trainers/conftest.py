"""A rebuilt trainer that can be imported, and a small model."""

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import FULL
from tests.support import miles_fork
from tests.trainers import oracle, rebuilt, small_model


@pytest.fixture
def trainer(request, tmp_path):
    """Let the trainer `name` of the test's parameters be imported; `edits` are pairs of its text and what replaces it."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    name, files = params.get("name", "slime"), {}
    for path, text in rebuilt.SOURCES[name].items():
        for old, new in params.get("edits", ()):
            text = text.replace(old, new)
        files[path] = text
    with rebuilt.imports(tmp_path, files), oracle.process():
        yield name


@pytest.fixture
def chunks(request, trainer):
    if miles_fork.IS_IMPORTED:
        pytest.skip("Megatron-Core is miles' own, whose routers need miles' own code: test_trainers.py runs it.")
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    # Only Megatron-RL's engine records with Megatron-Core's RouterReplay here.
    records = params.get("name") == "megatron_rl"
    if records and not hasattr(TransformerConfig, "moe_enable_routing_replay"):
        pytest.skip("Megatron-RL came with a later Megatron-LM, whose config has moe_enable_routing_replay.")
    return small_model.build(ParallelSizes(), moe_enable_routing_replay=records, **FULL)
