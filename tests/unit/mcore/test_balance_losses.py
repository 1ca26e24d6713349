"""What auxiliary losses see under a session: tokens alone, each once, with the load of the live scores.

The oracle calls Megatron-Core's own loss function on the logits of the tokens, with padding cut away by hand, and lets
autograd differentiate that. The loss itself is told apart from the rest of the gradient by a run with aux_loss="off".
"""

import types
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError
from megatron_router_replay.mcore.balance import aux_loss_group
from tests.unit.mcore.balanced_chunk import BALANCED_KINDS, balanced, logged, not_compiled, one_rank, switch_loss
from tests.unit.mcore.tiny_chunk import EXPERTS, TOPK, Chunk, plain, random_routes, tokens

__all__ = ["not_compiled", "one_rank"]
pytestmark = pytest.mark.usefixtures("one_rank")

NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
COEFFICIENT = 0.5
PADDING = torch.tensor([[False, False, False, True], [False, False, True, True]])  # [b, s]
ROWS = torch.tensor([[0, 1, 2, -1], [3, 4, -1, -1]])
ROUTES = random_routes(5)


def with_loss(*names: str, **options: Any) -> Chunk:
    """A chunk with these losses; given as Megatron-Core takes several, in lists, unless there is one."""
    several = len(names) > 1
    chunk = balanced(
        moe_router_load_balancing_type=list(names) if several else names[0],
        moe_aux_loss_coeff=[COEFFICIENT] * len(names) if several else COEFFICIENT,
        **options,
    )
    for name in NAMES.values():
        logged(name)
    return cut(chunk)


def cut(chunk: Chunk) -> Chunk:
    """Keep each layer's loss to its own router: what enters routers carries no gradient to those before."""
    for router in chunk.routers:
        router.register_forward_pre_hook(lambda module, args: (args[0].detach(), *args[1:]))
    return chunk


def trace() -> mrr.RoutingTrace:
    return mrr.RoutingTrace(topk_indices=ROUTES, layer_numbers=[1, 2, 3], num_experts=EXPERTS)


def run(chunk: Chunk, *, num_microbatches: int = 1, padding: Tensor | None = PADDING, **options: Any) -> list[Tensor]:
    """Replay micro-batches; return each router's gradient. What enters the routers does not depend on the losses."""
    chunk.zero_grad()
    with mrr.replay(chunk, trace(), **options) as session:
        losses = []
        for number in range(num_microbatches):
            session.microbatch(ROWS, padding=padding)
            losses.append(chunk(tokens(2, 4, seed=number + 1), number).square().mean())
        torch.stack(losses).sum().backward()
    return [router.weight.grad.clone() for router in chunk.routers]


def inputs_of(chunk: Chunk, num_microbatches: int = 1) -> list[list[Tensor]]:
    """What enters each router in each micro-batch, [s, b, h]: layer -> micro-batch."""
    seen: list[list[Tensor]] = [[] for _ in chunk.routers]

    def keep(position: int) -> Any:
        return lambda router, args: seen[position].append(args[0].detach().clone())

    around, chunk.around = chunk.around, plain
    handles = [router.register_forward_pre_hook(keep(i)) for i, router in enumerate(chunk.routers)]
    run(chunk, num_microbatches=num_microbatches, aux_loss="off")
    for handle in handles:
        handle.remove()
    chunk.around = around
    return seen


def loss_by_hand(
    name: str, hidden: Tensor, weight: Tensor, earlier: list[Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return (loss, load [num_experts]) of one layer: of its tokens alone, one sequence after the other.

    Args:
        hidden: [s, b, h].
        earlier: for global_aux_loss, the loads of the micro-batches before.
    """
    keep = ~PADDING
    of_tokens = hidden.transpose(0, 1)[keep]  # [5, h]: three of the first sequence, two of the second
    scores = torch.softmax(torch.nn.functional.linear(of_tokens, weight), dim=-1)
    chosen = torch.zeros_like(scores).scatter(1, scores.topk(TOPK, dim=1).indices, 1.0)

    def switch(rows: slice, load: Tensor, num_tokens: float) -> Tensor:
        return switch_loss(scores[rows], load, num_tokens, COEFFICIENT)

    if name == "seq_aux_loss":
        # Megatron-Core averages over sequences, and divides each by the mean of their lengths: (3 + 2) / 2.
        parts = [switch(rows, chosen[rows].sum(0), 2.5) for rows in (slice(0, 3), slice(3, 5))]
        return (parts[0] + parts[1]) / 2, chosen.sum(0)
    load = chosen.sum(0)
    if name == "global_aux_loss":
        loads = [*(earlier or []), load]
        return switch(slice(0, 5), torch.stack(loads).sum(0) / len(loads), 5), load
    return switch(slice(0, 5), load, 5), load


def expected(
    chunk: Chunk, names: tuple[str, ...], num_microbatches: int = 1, order: list[int] | None = None
) -> tuple[list[Tensor], dict[str, list[float]]]:
    """Return (gradient of each router by these losses alone, what is logged of each)."""
    hidden = inputs_of(chunk, num_microbatches)
    gradients, logs = [], {name: [0.0] * 3 for name in names}
    for layer, router in enumerate(chunk.routers):
        weight = router.weight.detach().clone().requires_grad_()
        total = weight.new_zeros(())
        for name in names:
            earlier: list[Tensor] = []
            for number in order or range(num_microbatches):
                loss, load = loss_by_hand(name, hidden[layer][number], weight, earlier)
                earlier.append(load)
                total = total + loss
                logs[name][layer] += float(loss.detach() / COEFFICIENT)
        gradients.append(torch.autograd.grad(total, weight)[0])
    return gradients, logs


def check_losses(
    chunk: Chunk, names: tuple[str, ...], num_microbatches: int = 1, order: list[int] | None = None
) -> None:
    """Compare gradients of the losses alone, and what is logged of them, with those by hand."""
    gradients, logs = expected(chunk, names, num_microbatches, order)
    without = run(chunk, num_microbatches=num_microbatches, aux_loss="off")
    assert all(logged(NAMES[name]) is None or not logged(NAMES[name]).any() for name in names)
    for router in chunk.routers:
        router.reset_global_aux_loss_tracker()
    for one, off, by_hand in zip(run(chunk, num_microbatches=num_microbatches), without, gradients):
        torch.testing.assert_close(one - off, by_hand, rtol=1e-4, atol=1e-5)
        assert by_hand.abs().max() > 1e-3
    for name in names:
        torch.testing.assert_close(logged(NAMES[name]), torch.tensor(logs[name]))


@pytest.mark.parametrize("kind", BALANCED_KINDS)
@pytest.mark.parametrize(
    "names",
    [("aux_loss",), ("seq_aux_loss",), ("global_aux_loss",), ("aux_loss", "seq_aux_loss", "global_aux_loss")],
    ids="+".join,
)
def test_a_loss_is_that_of_the_tokens_alone_whatever_recomputes(names, kind):
    chunk = with_loss(*names)
    chunk.around = BALANCED_KINDS[kind]
    check_losses(chunk, names)


@pytest.mark.parametrize("kind", ["plain", "reentrant", "non-reentrant", "by hooks"])
def test_several_micro_batches_in_one_backward_add_their_global_load_up_once(kind):
    chunk = with_loss("global_aux_loss")
    chunk.around = BALANCED_KINDS[kind]
    # A reentrant checkpoint first has gradients in its recompute, and autograd runs the youngest first.
    check_losses(chunk, ("global_aux_loss",), 2, [1, 0] if kind == "reentrant" else [0, 1])
    for router in chunk.routers:
        assert router.ga_steps == 2
        assert router.global_tokens_per_expert.sum() == 2 * 5 * TOPK


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_changed_where_no_padding_is_known(name):
    """The default without padding is Megatron-Core's own to the last bit: a frozen forward beside one without a session."""
    alone, frozen = with_loss(name), with_loss(name)
    alone(tokens(2, 4), 0).square().mean().backward()
    log = logged(NAMES[name])
    with mrr.freeze_recompute(frozen):
        frozen(tokens(2, 4), 0).square().mean().backward()
    assert torch.equal(log, logged(NAMES[name]))
    for one, other in zip(alone.parameters(), frozen.parameters()):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("kind", ["plain", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", NAMES)
def test_a_micro_batch_of_padding_alone_has_no_loss_and_harms_no_gradient(name, kind):
    """Megatron-Core divides by its number of tokens, 0: a loss that is not a number, and then weights that are none."""
    chunk = with_loss(name)
    chunk.around = BALANCED_KINDS[kind]

    def gradients(choice: str) -> list[Tensor]:
        chunk.zero_grad()
        with mrr.replay(chunk, trace(), aux_loss=choice) as session:
            session.microbatch(torch.full((2, 4), -1), padding=torch.ones(2, 4, dtype=torch.bool))
            session.microbatch(ROWS, padding=PADDING)
            loss = sum(chunk(tokens(2, 4), number).square().mean() for number in range(2))
            loss.backward()
        return [router.weight.grad.clone() for router in chunk.routers]

    on, off = gradients("live"), gradients("off")
    assert all(one.isfinite().all() for one in on)
    assert not any(torch.equal(one, other) for one, other in zip(on, off))  # the other micro-batch has a loss
    assert logged(NAMES[name]).isfinite().all()


@pytest.mark.parametrize(
    ("coefficients", "group"),
    [
        ({}, None),
        ({"aux_loss": 0.1}, "tp_cp"),
        ({"seq_aux_loss": 0.1}, "tp_cp"),
        ({"aux_loss": 0.1, "global_aux_loss": 0.1}, "tp_dp_cp"),
    ],
)
def test_ranks_that_share_a_loss_are_those_of_its_largest_group(coefficients, group):
    def coefficient(name: str) -> float:
        return coefficients.get(name, 0.0)

    router = types.SimpleNamespace(get_aux_loss_coeff=coefficient, tp_cp_group="tp_cp", tp_dp_cp_group="tp_dp_cp")
    assert aux_loss_group([router]) == group


def test_a_padding_mask_of_megatrons_own_holds_too():
    """Tokens that either of the two masks are left out."""
    chunk = with_loss("aux_loss")
    gradients, logs = expected(chunk, ("aux_loss",))
    for layer in chunk.layers:
        # Megatron-Core gets [s, b]: here it is told of the second sequence, the session of the first.
        layer.router_args = (torch.stack([torch.zeros(4, dtype=torch.bool), PADDING[1]], dim=1),)
    of_first = torch.stack([PADDING[0], torch.zeros(4, dtype=torch.bool)])

    off, on = run(chunk, padding=of_first, aux_loss="off"), run(chunk, padding=of_first)
    # Behind the first layer, the rows that Megatron-Core alone calls padding went to live experts.
    torch.testing.assert_close(on[0] - off[0], gradients[0], rtol=1e-4, atol=1e-5)
    assert logged("load_balancing_loss")[0].item() == pytest.approx(logs["aux_loss"][0], rel=1e-5)


@pytest.mark.parametrize("name", ["seq_aux_loss", ["aux_loss", "seq_aux_loss"]])
def test_a_loss_of_sequences_refuses_packed_ones(name):
    chunk = with_loss(*([name] if isinstance(name, str) else name))
    packed = types.SimpleNamespace()

    def step(**options: Any) -> None:
        with mrr.replay(chunk, trace(), **options) as session:
            session.microbatch(ROWS, padding=PADDING)
            chunk(tokens(2, 4), 0, packed_seq_params=packed).square().mean().backward()

    with pytest.raises(
        ReplayStateError, match="seq_aux_loss balances each sequence, but the model got packed sequences"
    ):
        step()
    step(aux_loss="off")
    chunk.eval()  # there is no loss
    step()


def test_a_fused_loss_is_left_to_the_unfused_code_where_there_is_padding(monkeypatch):
    """Stand-ins for Transformer Engine's two kernels: of the scores, and of the loss, which takes whole numbers alone."""
    chunk = with_loss("aux_loss")
    gradients, _ = expected(chunk, ("aux_loss",))
    without = run(chunk, aux_loss="off")
    calls = []

    def fused_scores(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
        routing_map, scores = scores_for_aux_loss(logits, topk, score_function)
        return routing_map, scores

    def fused_loss(*, total_num_tokens: int, **others: Any) -> Tensor:
        assert isinstance(total_num_tokens, int)
        calls.append(total_num_tokens)
        others["moe_aux_loss_coeff"] = others.pop("coeff")
        return switch_load_balancing_loss_func(total_num_tokens=total_num_tokens, **others)

    scores_for_aux_loss = moe_utils.compute_routing_scores_for_aux_loss
    monkeypatch.setattr(moe_utils, "HAVE_TE", True)
    monkeypatch.setattr(moe_utils, "fused_compute_score_for_moe_aux_loss", fused_scores, raising=False)
    monkeypatch.setattr(moe_utils, "fused_moe_aux_loss", fused_loss, raising=False)
    chunk.config.moe_router_fusion = True
    for one, off, by_hand in zip(run(chunk), without, gradients):
        torch.testing.assert_close(one - off, by_hand, rtol=1e-4, atol=1e-5)
    assert calls == []
    rows = torch.tensor([[0, 1], [2, 3]])
    with mrr.replay(chunk, trace()) as session:
        session.microbatch(rows)
        chunk(tokens(2, 2), 0).square().mean().backward()
    assert calls == [4, 4, 4]
