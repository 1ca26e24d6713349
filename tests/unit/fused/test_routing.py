"""route in torch, against Megatron-Core's unfused path and the formula."""

import pytest
import torch
import torch.utils.checkpoint

from megatron_router_replay.errors import ReplayStateError, TraceError, UnsupportedRouterError
from megatron_router_replay.fused import Rounding, route
from megatron_router_replay.router_replay import RouterReplay, RouterReplayAction
from tests.unit.fused.cases import MODES, SHAPES, formula, inputs, largest_error, outcome

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def megatrons(mode, topk, replay):
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils", reason="compares with Megatron-Core")
    return lambda logits: moe_utils.topk_routing_with_score_function(logits, topk, router_replay=replay, **mode)


def installed_rounding() -> Rounding:
    """Megatron-Core 0.18 keeps scores in float32 and rounds probabilities last."""
    from megatron.core import __version__

    return Rounding.LATE if tuple(map(int, __version__.split(".")[:2])) >= (0, 18) else Rounding.EARLY


def replaying(topk_indices) -> RouterReplay:
    replay = RouterReplay()
    replay.set_target_indices(topk_indices)
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    return replay


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("mode", [mode for name, mode in MODES.items() if "softmax" in name])
def test_softmaxes_are_bit_identical_to_megatrons_replay(mode, shape, dtype):
    logits, topk_indices, weights = inputs(*shape, dtype)
    theirs = outcome(megatrons(mode, shape[2], replaying(topk_indices)), logits, weights)
    rounding = installed_rounding()
    ours = outcome(lambda leaf: route(leaf, topk_indices, exact=True, rounding=rounding, **mode), logits, weights)
    assert [tensor.dtype for tensor in ours] == [dtype, torch.bool, dtype]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("mode", ["sigmoid", "sigmoid-scaled"])
def test_sigmoid_is_megatrons_replay_to_the_rounding_of_one_sigmoid(mode, shape, biased):
    logits, topk_indices, weights = inputs(*shape, torch.float32)
    mode = MODES[mode]
    bias = {"expert_bias": torch.linspace(-1, 1, shape[1])} if biased else {}  # moves only the selection
    theirs = outcome(megatrons(mode | bias, shape[2], replaying(topk_indices)), logits, weights)
    ours = outcome(lambda leaf: route(leaf, topk_indices, **mode), logits, weights)
    assert largest_error(ours, theirs) <= 2.5 * 2**-23


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("mode", ["sigmoid", "sigmoid-scaled"])
def test_sigmoid_is_bit_identical_where_no_vector_is_cut(mode, dtype):
    logits, topk_indices, weights = inputs(64, 32, 4, dtype)
    theirs = outcome(megatrons(MODES[mode], 4, replaying(topk_indices)), logits, weights)
    rounding = installed_rounding()
    ours = outcome(lambda leaf: route(leaf, topk_indices, rounding=rounding, **MODES[mode]), logits, weights)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_it_is_the_formula(mode, shape):
    logits, topk_indices, weights = inputs(*shape, torch.float32)
    probs, routing_map = formula(leaf := logits.double().requires_grad_(), topk_indices, mode)
    (probs * weights).sum().backward()
    ours = outcome(lambda leaf: route(leaf, topk_indices, **mode), logits, weights)
    assert leaf.grad is not None
    assert largest_error(ours, (probs.detach(), routing_map, leaf.grad)) < 1e-6


def test_two_experts_by_hand():
    logits = torch.tensor([[0.0, 5.0, 0.0, -torch.inf]])
    probs, routing_map = route(logits, torch.tensor([[2, 0]]), scaling_factor=3.0)
    assert probs.tolist() == [[1.5, 0, 1.5, 0]]
    assert routing_map.tolist() == [[True, False, True, False]]
    assert route(logits, torch.tensor([[2]]), score_function="sigmoid")[0].tolist() == [[0, 0, 0.5, 0]]
    assert route(logits, torch.tensor([[2, 0]]), score_function="sigmoid")[0].tolist() == [[0.5, 0, 0.5, 0]]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("groups", [{}, {"num_groups": 4, "group_topk": 2}], ids=["", "groups"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_native_indices_give_what_live_routing_gives(mode, groups, dtype):
    logits, _, weights = inputs(64, 32, 4, dtype)
    recorder = RouterReplay()
    recorder.set_router_replay_action(RouterReplayAction.RECORD)
    outcome(megatrons(mode | groups, 4, recorder), logits, weights)
    live = outcome(megatrons(mode | groups, 4, None), logits, weights)
    native = recorder.get_recorded_indices().to(torch.uint8)
    rounding = installed_rounding()
    ours = outcome(lambda leaf: route(leaf, native, exact=True, rounding=rounding, **mode), logits, weights)
    assert all(torch.equal(a, b) for a, b in zip(ours, live))


def test_the_graph_keeps_compact_indices_and_the_chosen_scores_only():
    logits, topk_indices, _ = inputs(64, 32, 4, torch.float32)
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        route(logits.requires_grad_(), topk_indices)
    assert sorted(tensor.numel() * tensor.element_size() for tensor in kept) == [64 * 4, 64 * 4 * 4]
    assert any(tensor.data_ptr() == topk_indices.data_ptr() for tensor in kept)


def test_no_gradient_is_made_where_none_is_asked_for():
    logits, topk_indices, _ = inputs(8, 8, 2, torch.float32)
    assert not route(logits, topk_indices)[0].requires_grad
    with torch.no_grad():
        assert not route(logits.requires_grad_(), topk_indices)[0].requires_grad
    probs, routing_map = route(logits, topk_indices)
    assert probs.requires_grad
    assert not routing_map.requires_grad


def test_deterministic_mode_changes_nothing():
    logits, topk_indices, weights = inputs(64, 32, 4, torch.float32)
    expected = outcome(lambda leaf: route(leaf, topk_indices, exact=True), logits, weights)
    torch.use_deterministic_algorithms(True)
    try:
        theirs = outcome(megatrons({}, 4, replaying(topk_indices)), logits, weights)
        ours = outcome(lambda leaf: route(leaf, topk_indices, exact=True), logits, weights)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(ours, expected, theirs))


def test_a_model_in_float64_keeps_its_dtype():
    logits, topk_indices, weights = inputs(64, 32, 4, torch.float64)
    theirs = outcome(megatrons({}, 4, replaying(topk_indices)), logits, weights)
    ours = outcome(lambda leaf: route(leaf, topk_indices, exact=True), logits, weights)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs))
    assert route(logits, topk_indices)[0].dtype == torch.float64


def test_it_serves_a_checkpoint_that_compares_what_forward_and_recompute_save():
    logits, topk_indices, weights = inputs(64, 32, 4, torch.float32)
    expected = outcome(lambda leaf: route(leaf * 2, topk_indices), logits, weights)

    def recomputed(leaf):
        return torch.utils.checkpoint.checkpoint(lambda x: route(x * 2, topk_indices), leaf, use_reentrant=False)

    assert all(torch.equal(a, b) for a, b in zip(outcome(recomputed, logits, weights), expected))


def test_a_second_derivative_is_refused_not_left_out():
    logits, topk_indices, weights = inputs(8, 8, 2, torch.float32)
    probs, _ = route(logits.requires_grad_(), topk_indices)
    with pytest.raises(UnsupportedRouterError, match="create_graph=True"):
        torch.autograd.grad((probs * weights).sum(), logits, create_graph=True)


def test_no_tokens_are_routed_to_nothing():
    logits = torch.randn(0, 8, requires_grad=True)
    probs, routing_map = route(logits, torch.zeros(0, 2, dtype=torch.uint8))
    probs.sum().backward()
    assert probs.shape == routing_map.shape == logits.grad.shape == (0, 8)


@pytest.mark.parametrize(
    ("topk_indices", "error", "match"),
    [
        (torch.zeros(3, 2, dtype=torch.uint8), ReplayStateError, r"\[4, 8\] to topk_indices \[3, 2\]"),
        (torch.zeros(4, dtype=torch.uint8), ReplayStateError, r"topk_indices \[4\]"),
        (torch.zeros(4, 9, dtype=torch.uint8), ReplayStateError, r"topk_indices \[4, 9\]"),
        (torch.zeros(4, 0, dtype=torch.uint8), ReplayStateError, r"topk_indices \[4, 0\]"),
        (torch.zeros(4, 2), TraceError, "integers, got torch.float32"),
        (torch.ones(4, 2, dtype=torch.bool), TraceError, "integers, got torch.bool"),
        (torch.tensor([[0, 8]] * 4, dtype=torch.uint8), RuntimeError, "out of bounds"),
        (torch.tensor([[0, -1]] * 4, dtype=torch.int16), RuntimeError, "out of bounds"),
    ],
)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_wrong_indices_raise(topk_indices, error, match, mode):
    with pytest.raises(error, match=match):
        route(torch.randn(4, 8), topk_indices, **mode)


def test_an_unknown_score_function_is_refused_by_name():
    with pytest.raises(UnsupportedRouterError, match="cosine"):
        route(torch.randn(4, 8), torch.zeros(4, 1, dtype=torch.uint8), score_function="cosine")


def test_indices_written_to_before_the_backward_raise():
    logits, topk_indices, _ = inputs(8, 8, 2, torch.float32)
    probs, _ = route(logits.requires_grad_(), topk_indices)
    topk_indices.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        probs.sum().backward()
