"""route inside torch.compile, on a CPU: one graph, forward and backward."""

import pytest
import torch

from megatron_router_replay.fused import route
from tests.unit.fused.cases import MODES, inputs, largest_error, outcome


def compiled(mode, topk_indices, **options):
    return torch.compile(lambda leaf: route(leaf * 2, topk_indices, **mode), fullgraph=True, **options)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_it_is_one_graph_with_the_same_results(mode):
    torch._dynamo.reset()
    logits, topk_indices, weights = inputs(64, 32, 4, torch.float32)
    expected = outcome(lambda leaf: route(leaf * 2, topk_indices, **mode), logits, weights)
    actual = outcome(compiled(mode, topk_indices, backend="aot_eager"), logits, weights)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["softmax", "pre-softmax", "sigmoid-scaled"])
def test_inductor_compiles_it_also_with_dynamic_shapes(mode):
    torch._dynamo.reset()
    function = torch.compile(
        lambda leaf, indices: route(leaf * 2, indices, **MODES[mode]), fullgraph=True, dynamic=True
    )
    for num_tokens in (64, 48):
        logits, topk_indices, weights = inputs(num_tokens, 32, 4, torch.float32)
        expected = outcome(lambda leaf: route(leaf * 2, topk_indices, **MODES[mode]), logits, weights)  # noqa: B023
        assert largest_error(outcome(lambda leaf: function(leaf, topk_indices), logits, weights), expected) < 1e-6  # noqa: B023
