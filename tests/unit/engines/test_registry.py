"""An engine is one file: who adds one finds it in the pages and the parameters of tests."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_router_replay import engines
from megatron_router_replay.engines import registry
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import FORMS, routes, tokens

ROOT = Path(__file__).parents[3]
FILE = '''
"""Toy: `experts` [S - 1, Lm, topk] beside `prompt` and `answer`."""

from megatron_router_replay.engines.decoder import Decoder
from megatron_router_replay.engines.reader import ReplyReader
from megatron_router_replay.engines.registry import register
from megatron_router_replay.engines.rows import moe_layers

FIELDS = {"routed_experts": ("experts",), "prompt_token_ids": ("prompt",), "output_token_ids": ("answer",)}

toy = register(
    Decoder(
        name="toy",
        title="Toy",
        read=ReplyReader(engine="Toy", fields=FIELDS).read,
        rows=moe_layers,
        start="Wind it up.",
        request="ask(toy)",
        sends="What it thinks.",
        versions="1.0",
        tested="here",
    )
)
'''


def pages():
    spec = importlib.util.spec_from_file_location("engine_pages", ROOT / "docs" / "site" / "engine_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def toy(tmp_path):
    path = tmp_path / "toy.py"
    path.write_text(FILE)
    spec = importlib.util.spec_from_file_location("toy", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    registry.unregister("toy")


def test_an_engine_in_one_file_is_found_everywhere(toy):
    rows, prompt, answer = routes(8, 3, num_experts=16, topk=2), tokens(5), tokens(4, seed=2)
    reply = {"prompt": prompt, "answer": answer, "experts": rows.tolist()}
    model = {"model_type": "mixtral", "num_hidden_layers": 3, "num_local_experts": 16, "num_experts_per_tok": 2}
    trace = engines.toy.decode(reply, model=model)
    assert np.array_equal(trace.topk_indices[:-1], rows)
    assert trace.token_ids.tolist() == prompt + answer
    with pytest.raises(PayloadError, match=r"Toy: experts.*missing.*Wind it up\."):
        engines.toy.decode(reply | {"experts": None}, model=model)

    assert "toy" in [decoder.name for decoder in registry.registered()]  # of which tests make their parameters
    made = pages()
    assert "### Toy: `engines.toy`\n\nWind it up.\n\n```text\nask(toy)\n```\n\nWhat it thinks." in made.blocks()
    assert "| Toy | 1.0 | here |\n" in made.table()
    assert made.outdated() == ["get_routes.md", "support.md", "api/engines.md"]
    with pytest.raises(PayloadError, match="'toy' is registered already"):
        registry.register(toy.toy)


def test_the_pages_list_the_engines_that_there_are():
    assert pages().outdated() == []


def test_every_engine_has_a_file_and_a_payload_in_the_tests():
    assert [decoder.name for decoder in registry.registered()] == sorted(registry.FILES)
    assert {form.split()[0] for form in FORMS} == {*registry.FILES, "array"}
    assert {*registry.FILES, "register", "array"} < set(dir(engines))
    for name in registry.FILES:
        module = sys.modules[f"megatron_router_replay.engines.decoders.{name}"]
        assert getattr(engines, name) is getattr(module, name)
        assert f"engines.{name}" in (ROOT / "docs" / "get_routes.md").read_text()
    with pytest.raises(AttributeError, match="has no attribute 'toys'"):
        _ = engines.toys
