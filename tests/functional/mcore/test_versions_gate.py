"""A Megatron-Core newer than all tested ones: sessions must verify, and what nobody here has read is refused by name."""

import dataclasses
from typing import Any

import megatron.core

import megatron_router_replay as mrr
from megatron_router_replay.mcore.compat import is_newer_than_tested, megatron_version
from megatron_router_replay.mcore.find import find_routers
from megatron_router_replay.mcore.support import check_supported
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import Case, build


def gate(version: str | None, **unknown: Any) -> str:
    """What a model whose config has further `moe_*` fields is told when megatron.core says that it is of this version."""
    _, (model,), _ = build(Case(layout=ParallelSizes()))
    config = model.decoder.layers[0].mlp.router.config
    fields = [(name, type(value), dataclasses.field(default=None)) for name, value in unknown.items()]
    config.__class__ = dataclasses.make_dataclass("OfTomorrow", fields, bases=(type(config),))
    for name, value in unknown.items():
        setattr(config, name, value)
    before = megatron.core.__version__
    megatron.core.__version__ = before if version is None else version
    try:
        must_verify = check_supported(find_routers(model))
        return f"accepted; explain says {mrr.explain(model).replayable}; must verify: {must_verify}"
    except mrr.RouterReplayError as error:
        return str(error)
    finally:
        megatron.core.__version__ = before


def test_the_installed_version_must_be_verified_only_if_it_is_newer_than_tested(workers_1):
    newer = is_newer_than_tested(megatron_version())
    assert workers_1.run(gate, None) == [f"accepted; explain says True; must verify: {newer}"]


def test_a_tested_version_is_not_asked_about_fields(workers_1):
    (said,) = workers_1.run(gate_with_a_dream, "0.19.2")
    assert said == "accepted; explain says True; must verify: False"


def gate_with_a_dream(version: str) -> str:
    return gate(version, moe_router_dreams=0.5)


def test_a_newer_version_must_be_verified(workers_1):
    assert workers_1.run(gate, "0.21.0") == ["accepted; explain says True; must verify: True"]


def test_a_newer_version_refuses_a_setting_that_is_unknown_here(workers_1):
    (said,) = workers_1.run(gate_with_a_dream, "0.21.0")
    assert "layer 1 (decoder.layers.0.mlp.router): moe_router_dreams=0.5 is unknown here" in said
    assert "Megatron-Core 0.21.0 is newer than 0.19.2" in said
