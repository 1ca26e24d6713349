"""Which Megatron-Core will do: the feature decides, tried out on the routing function; numbers only say what was tested."""

from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from torch import Tensor

from megatron_router_replay.errors import UnsupportedRouterError
from megatron_router_replay.mcore.compat import (
    TESTED,
    check_routing_function,
    check_version,
    is_newer_than_tested,
    megatron_version,
    version_numbers,
)


def test_the_imported_megatron_core_replays_and_its_version_is_its_own_word():
    check_version()
    assert megatron_version() == megatron.core.__version__


@pytest.mark.parametrize(
    ("version", "numbers"), [("0.16.1", (0, 16, 1)), ("0.16.0rc0", (0, 16, 0)), ("0.20", (0, 20)), ("core_dev", ())]
)
def test_a_version_is_its_leading_numbers(version, numbers):
    assert version_numbers(version) == numbers


@pytest.mark.parametrize(
    ("version", "newer"),
    [
        ("0.16.0rc0", False),
        ("0.18.2", False),
        ("0.19.2", False),
        ("0.19.2+d98e8a6", False),
        ("0.19.3", True),
        ("0.20.0", True),
        ("0.100.0", True),
        ("1.0", True),
        ("unknown", True),
    ],
)
def test_what_is_newer_than_all_that_was_tested(version, newer):
    assert TESTED[-1] == "0.19.2"
    assert is_newer_than_tested(version) is newer


def test_a_routing_function_without_the_feature_is_refused_whatever_its_number():
    def before_0_16(logits: Tensor, topk: int, fused: bool = False) -> Any:
        return topk_routing_with_score_function(logits, topk, fused=fused)

    with pytest.raises(
        UnsupportedRouterError, match=r"0\.15\.3 .*no router_replay argument.*0\.16\.1, 0\.17\.1, 0\.18\.2"
    ):
        check_routing_function(before_0_16, "0.15.3")


def ignores_it(logits: Tensor, topk: int, router_replay: Any = None, **options: Any) -> Any:
    return topk_routing_with_score_function(logits, topk, **options)


def ignores_it_for_sigmoid(logits: Tensor, topk: int, router_replay: Any = None, **options: Any) -> Any:
    heard = None if options["score_function"] == "sigmoid" else router_replay
    return topk_routing_with_score_function(logits, topk, router_replay=heard, **options)


def asks_twice(*args: Any, **options: Any) -> Any:
    topk_routing_with_score_function(*args, **options)
    return topk_routing_with_score_function(*args, **options)


def adds_an_expert(*args: Any, **options: Any) -> Any:
    probs, routing_map = topk_routing_with_score_function(*args, **options)
    return probs, routing_map | torch.tensor([[True, False, False, False]])


def loses_a_probability(*args: Any, **options: Any) -> Any:
    probs, routing_map = topk_routing_with_score_function(*args, **options)
    return probs * torch.tensor([[1.0, 0.0, 1.0, 1.0]]), routing_map


@pytest.mark.parametrize(
    "function", [ignores_it, ignores_it_for_sigmoid, asks_twice, adds_an_expert, loses_a_probability]
)
def test_a_routing_function_that_does_not_do_what_the_replay_object_says_is_refused(function):
    with pytest.raises(UnsupportedRouterError, match=r"9\.9 cannot replay routes exactly"):
        check_routing_function(function, "9.9")


def test_a_routing_function_is_tried_out_once():
    calls = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(options["score_function"])
        return topk_routing_with_score_function(*args, **options)

    check_routing_function(counted, "9.9")
    check_routing_function(counted, "9.9")
    assert calls == ["softmax", "sigmoid"]
