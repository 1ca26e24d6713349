"""A Megatron-Core is supported if its routing function takes router_replay; version numbers only name the tested ones."""

import contextlib
import functools
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.transformer.moe import router as router_module
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay import checks
from megatron_router_replay.errors import ReplayStateError, UnsupportedRouterError
from megatron_router_replay.mcore.model.upstream import (
    TESTED,
    check_version,
    is_newer_than_tested,
    megatron_version,
    must_verify,
)
from tests.unit.mcore.tiny_chunk import EXPERTS, ROWS, Chunk, random_trace, reentrant, tokens

pytestmark = pytest.mark.version


def test_the_imported_megatron_core_replays_and_its_version_is_its_own_word():
    check_version()
    assert megatron_version() == megatron.core.__version__


@pytest.mark.parametrize("version", ["0.16.0rc0", "0.18.2", "0.19.2", "0.19.2+d98e8a6"])
def test_versions_up_to_the_last_tested_one_are_known(version):
    assert TESTED[-1] == "0.19.2"
    assert not is_newer_than_tested(version)


@pytest.mark.parametrize("version", ["0.19.3", "0.20.0", "0.100.0", "1.0", "unknown"])
def test_a_version_above_all_that_were_tested_is_newer(version):
    assert is_newer_than_tested(version)


def before_0_16(logits: Tensor, topk: int, fused: bool = False) -> Any:
    raise AssertionError("it is not called")


def of_a_trainer(*args: Any, router_replay: Any = None, **options: Any) -> Any:
    return topk_routing_with_score_function(*args, router_replay=router_replay, **options)


def test_a_routing_function_without_the_feature_is_refused_whatever_its_number(monkeypatch):
    monkeypatch.setattr(router_module, "topk_routing_with_score_function", before_0_16)
    with pytest.raises(UnsupportedRouterError, match=r"no router_replay argument.*0\.16\.1, 0\.17\.1, 0\.18\.2"):
        check_version()
    with pytest.raises(UnsupportedRouterError, match="no router_replay argument"):
        mrr.freeze_recompute(Chunk())


def test_where_nobody_here_has_read_what_routes_every_decision_is_verified(monkeypatch):
    assert must_verify() == is_newer_than_tested(megatron.core.__version__)
    monkeypatch.setattr(router_module, "topk_routing_with_score_function", of_a_trainer)
    assert must_verify()
    monkeypatch.undo()
    monkeypatch.setattr(megatron.core, "__version__", "0.20.0")
    monkeypatch.setattr(checks, "_warned", set())
    assert must_verify()
    chunk = Chunk()
    chunk.around = reentrant
    with pytest.warns(
        RuntimeWarning, match=r"Megatron-Core 0\.20\.0 is newer than 0\.19\.2, .*verify every routing map"
    ):
        freeze = mrr.freeze_recompute(chunk)
    with freeze:
        chunk(tokens()).float().sum().backward()
    assert (freeze.report.decisions["wrong"], freeze.report.decisions["verified"]) == (0, 48)
    chunk.config.moe_expert_capacity_factor = 4.0  # nothing is dropped by probability
    with pytest.raises(UnsupportedRouterError, match=r"cannot verify layer 1 .*moe_expert_capacity_factor=4\.0"):
        mrr.freeze_recompute(chunk)


def ignores_it(*args: Any, router_replay: Any = None, **options: Any) -> Any:
    return topk_routing_with_score_function(*args, **options)


def asks_twice(*args: Any, **options: Any) -> Any:
    topk_routing_with_score_function(*args, **options)
    return topk_routing_with_score_function(*args, **options)


@functools.wraps(topk_routing_with_score_function)  # which copies the attributes of the function
def adds_an_expert(*args: Any, **options: Any) -> Any:
    probs, routing_map = topk_routing_with_score_function(*args, **options)
    return probs, routing_map | torch.eye(EXPERTS, dtype=torch.bool)[:1]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (ignores_it, "layer 1 chose experts without a request to the session"),
        (asks_twice, "layer 1 requested its experts twice in one call"),
        (adds_an_expert, "decisions left their router with other experts than were decided"),
    ],
)
def test_a_routing_function_that_does_not_do_what_it_is_told_raises(function, message, monkeypatch):
    chunk = Chunk()
    monkeypatch.setattr(router_module, "topk_routing_with_score_function", function)
    with pytest.raises(ReplayStateError, match=message), mrr.replay(chunk, random_trace(8)) as session:
        session.microbatch(ROWS)
        chunk(tokens())


@pytest.mark.parametrize("is_hash_layer", [False, True])
def test_a_driven_router_without_a_request_raises_unless_a_table_routes_it(is_hash_layer, monkeypatch):
    monkeypatch.setattr(router_module, "topk_routing_with_score_function", ignores_it)
    chunk = Chunk(num_layers=1)
    (router,) = chunk.routers
    router.is_hash_layer = is_hash_layer
    router.router_replay = mrr.mcore.RouterReplay()
    router.router_replay.set_router_replay_action(mrr.mcore.RouterReplayAction.RECORD)
    raises = pytest.raises(ReplayStateError, match="layer 1 chose experts without a request to the session")
    with contextlib.nullcontext() if is_hash_layer else raises:
        chunk(tokens())
    router.router_replay.clear_router_replay_action()
