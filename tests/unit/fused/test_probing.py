"""probe tells an equal routing function from one that rounds elsewhere and from a wrong one."""

import math

import pytest
import torch

from megatron_router_replay.errors import ReplayStateError, UnsupportedRouterError
from megatron_router_replay.fused import Rounding, probe, route
from tests.unit.fused.cases import MODES, inputs, outcome
from tests.unit.fused.megatron_by_hand import routing_0_16, routing_0_18, with_options
from tests.unit.fused.test_routing import installed_rounding

ROOTS = {
    "sqrtsoftplus": {"score_function": "sqrtsoftplus"},
    "sqrtsoftplus-scaled": {"score_function": "sqrtsoftplus", "scaling_factor": 2.5},
}
SIZES = {"num_experts": 32, "topk": 4, "num_tokens": 64}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("mode", (MODES | ROOTS).values(), ids=MODES | ROOTS)
def test_the_rounding_of_0_18_is_bit_identical(mode, topk, dtype):
    logits, topk_indices, weights = inputs(64, 32, topk, dtype)
    theirs = outcome(lambda leaf: routing_0_18(leaf, topk_indices, **mode), logits, weights)
    ours = outcome(lambda leaf: route(leaf, topk_indices, exact=True, rounding=Rounding.LATE, **mode), logits, weights)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs))


def test_the_square_root_of_a_softplus_by_hand():
    """softplus(0) = ln 2; softplus(ln(e - 1)) = 1."""
    logits = torch.tensor([[0.0, math.log(math.e - 1), 7.0]])
    alone, _ = route(logits, torch.tensor([[0]]), score_function="sqrtsoftplus")
    assert alone[0].tolist() == pytest.approx([math.sqrt(math.log(2)), 0, 0])
    both, _ = route(logits, torch.tensor([[1, 0]]), score_function="sqrtsoftplus", scaling_factor=2.0)
    total = 1 + math.sqrt(math.log(2))
    assert both[0].tolist() == pytest.approx([2 * math.sqrt(math.log(2)) / total, 2 / total, 0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_both_versions_are_equal_under_their_own_rounding(mode, dtype):
    for function, rounding in ((routing_0_16, Rounding.EARLY), (routing_0_18, Rounding.LATE)):
        found = probe(with_options(function, MODES[mode]), device="cpu", dtype=dtype, **SIZES, **MODES[mode])
        assert found.is_equal
        assert found.is_within_rounding
        assert found.largest_error == 0
        # Early and late are the same thing in float32, and for probabilities that nothing is done to.
        if dtype is not torch.float32 and mode not in ("softmax", "pre-softmax"):
            assert found.rounding is rounding


def test_one_bit_is_not_equal_and_a_wrong_formula_not_within_rounding():
    def one_bit(logits, indices):
        probs, routing_map = routing_0_16(logits, indices)
        return torch.where(routing_map & (indices[:, :1] == 4), probs * (1 + 2**-23), probs), routing_map

    def another_expert(logits, indices):
        probs, routing_map = routing_0_16(logits, indices)
        return probs, routing_map.roll(1, dims=1)

    def pre_softmax(logits, indices):
        return routing_0_16(logits, indices, use_pre_softmax=True)

    def no_gradient(logits, indices):
        probs, routing_map = routing_0_16(logits.detach(), indices)
        return probs + 0 * logits, routing_map

    options = {"device": "cpu", "dtype": torch.float32, **SIZES}
    assert probe(routing_0_16, **options).is_equal
    found = probe(one_bit, **options)
    assert (found.is_equal, found.is_within_rounding) == (False, True)
    assert 0 < found.largest_error < 1e-6
    for wrong in (another_expert, pre_softmax, no_gradient):
        found = probe(wrong, **options)
        assert (found.is_equal, found.is_within_rounding) == (False, False)
    assert probe(another_expert, **options).largest_error == math.inf


def test_not_a_number_is_never_within_rounding():
    def broken(logits, indices):
        probs, routing_map = routing_0_16(logits, indices)
        return probs * torch.nan, routing_map

    found = probe(broken, device="cpu", dtype=torch.float32, **SIZES)
    assert (found.is_equal, found.is_within_rounding, found.largest_error) == (False, False, math.inf)


def test_the_faster_softmax_is_within_rounding():
    found = probe(routing_0_16, device="cpu", dtype=torch.float32, exact=False, num_experts=32, topk=8)
    assert (found.is_equal, found.is_within_rounding) == (False, True)


@torch.no_grad()
def test_it_works_and_leaves_no_trace_where_gradients_are_off():
    state = torch.random.get_rng_state()
    assert probe(routing_0_16, device="cpu", dtype=torch.float32, **SIZES).is_equal
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.is_grad_enabled()


def test_what_cannot_be_compared_is_refused():
    def dense_output(logits, indices):
        return logits.gather(1, indices), indices

    with pytest.raises(ReplayStateError, match=r"returns \[64, 4\] and \[64, 4\] for logits \[64, 32\]"):
        probe(dense_output, device="cpu", dtype=torch.float32, **SIZES)
    with pytest.raises(UnsupportedRouterError, match="'cosine'"):
        probe(routing_0_18, device="cpu", dtype=torch.float32, score_function="cosine", **SIZES)
    with pytest.raises(UnsupportedRouterError, match="no kernel"):
        route(torch.zeros(1, 4), torch.tensor([[0]]), score_function="sqrtsoftplus", backend="triton")
    with pytest.raises(UnsupportedRouterError, match="no kernel"):
        route(torch.zeros(1, 4).bfloat16(), torch.tensor([[0]]), rounding=Rounding.LATE, backend="triton")


def test_megatron_cores_own_function_is_equal_under_the_installed_version():
    """Whichever version this runs with: the probe finds its rounding."""
    moe_utils = pytest.importorskip("megatron.core.transformer.moe.moe_utils", reason="compares with Megatron-Core")

    class Given:
        """Answers get_replay_topk with what it is given, as the router's own replay object does."""

        def __init__(self, indices):
            self.indices = indices

        def get_replay_topk(self, scores, *_args):
            return scores.gather(1, self.indices), self.indices

    modes = MODES | (ROOTS if installed_rounding() is Rounding.LATE else {})
    for mode in modes.values():
        for dtype in DTYPES:

            def megatron(logits, indices, mode=mode):
                return moe_utils.topk_routing_with_score_function(
                    logits, indices.shape[1], router_replay=Given(indices), **mode
                )

            found = probe(megatron, device="cpu", dtype=dtype, **SIZES, **mode)
            assert found.is_equal
            if dtype is not torch.float32 and mode.get("scaling_factor"):
                assert found.rounding is installed_rounding()
