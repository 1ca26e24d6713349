"""A rebuilt trainer that can be imported, and a small model."""

import pytest

from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import FULL
from tests.trainers import oracle, rebuilt, small_model
from tests.trainers.stand_ins import trainer_imports
from tests.trainers.steps import write


@pytest.fixture
def trainer(request, tmp_path):
    """Let the trainer `name` of the test's parameters be imported; `edits` are pairs of its text and what replaces it."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    name, files = params.get("name", "slime"), {}
    for path, text in rebuilt.SOURCES[name].items():
        for old, new in params.get("edits", ()):
            text = text.replace(old, new)
        files[path] = text
    with trainer_imports(write(tmp_path, files), (name,)), oracle.process():
        yield name


@pytest.fixture
def chunks():
    return small_model.build(ParallelSizes(), **FULL)
