"""What Megatron-Core's expert-bias counters see under a session: each token once, padding never. Numbers by hand."""

import gc
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from torch import Tensor, nn

import megatron_router_replay as mrr
from megatron_router_replay.errors import TraceError, UnsupportedRouterError
from megatron_router_replay.mcore.core import hooks
from megatron_router_replay.mcore.core.call import RoutingCall
from tests.unit.mcore.balanced_chunk import BALANCED_KINDS, balanced, counters, not_compiled
from tests.unit.mcore.tiny_chunk import (
    EXPERTS,
    Chunk,
    bare,
    non_reentrant,
    plain,
    reentrant_with_gradients,
    tokens,
    watched,
)

__all__ = ["not_compiled"]  # a fixture of every test here

# Two sequences of three tokens. The last of the first sequence is padding; the last of the second has no route.
ROWS = torch.tensor([[0, 1, -1], [2, 3, -1]])
PADDING = torch.tensor([[False, False, True], [False, False, False]])
LIVE_AT = 5  # where routers see the token without a route: position 2 of sequence 1, s-major
ROUTES = torch.tensor(
    [
        [[0, 1], [2, 3], [4, 5]],
        [[0, 2], [2, 4], [4, 6]],
        [[0, 3], [2, 5], [4, 7]],
        [[1, 2], [3, 4], [5, 6]],
    ]
)
REPLAYED = [  # the four replayed tokens alone, counted by hand from ROUTES
    [3, 2, 2, 1, 0, 0, 0, 0],
    [0, 0, 3, 2, 2, 1, 0, 0],
    [0, 0, 0, 0, 3, 2, 2, 1],
]
BIASED: dict[str, Any] = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}


KINDS = BALANCED_KINDS | {"gradients on in a reentrant one": reentrant_with_gradients}


def trace() -> mrr.RoutingTrace:
    return mrr.RoutingTrace(topk_indices=ROUTES, layer_numbers=[1, 2, 3], num_experts=EXPERTS)


def with_live(replayed: list[list[int]], seen: Any, number: int = 0) -> list[list[int]]:
    """Add the experts that the token without a route went to, read off the maps that left the routers."""
    live = [seen[number, layer][0][LIVE_AT].int() for layer in (1, 2, 3)]
    return [(torch.tensor(one) + other).tolist() for one, other in zip(replayed, live)]


def step(chunk: Chunk, session: Any, *, padding: Tensor | None = PADDING, number: int = 0) -> Tensor:
    session.microbatch(ROWS, padding=padding)
    loss: Tensor = chunk(tokens(2, 3), number).square().sum()
    return loss


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [mrr.record, mrr.freeze_recompute])
def test_record_and_freeze_count_once_too(kind, start):
    chunk = balanced(**BIASED)
    chunk.around = KINDS[kind]
    told = start is mrr.record  # a freeze is told nothing of padding, and counts it as Megatron-Core does
    with watched(chunk) as seen, start(chunk) as session:
        if told:
            session.microbatch(torch.tensor([[0, 1, -1], [2, 3, 4]]), padding=PADDING)
        chunk(tokens(2, 3), 0).square().sum().backward()
    keep = torch.tensor([True, True, True, True, not told, True])
    assert counters(chunk) == [seen[0, layer][0][keep].sum(0).tolist() for layer in (1, 2, 3)]
    assert session.report.decisions["counted"] == 3 * int(keep.sum())


@pytest.mark.parametrize(("choice", "mode"), [("off", torch.enable_grad), ("replayed", torch.no_grad)])
def test_off_or_without_gradients_nothing_counts_and_what_was_counted_stays(choice, mode):
    chunk = balanced(**BIASED)
    for router in chunk.routers:
        router.local_tokens_per_expert += torch.arange(EXPERTS)
    with mrr.replay(chunk, trace(), expert_bias=choice) as session, mode():
        step(chunk, session)
    assert counters(chunk) == [list(range(EXPERTS))] * 3
    assert session.report.decisions["counted"] == 0
    assert str(session.report).splitlines()[-1].split() == ["expert-bias", "decisions", "0"]
    assert session.report.metrics()["router_replay/decisions_counted"] == 0.0


def test_padding_does_not_count_where_a_choice_runs_another_held_model():
    chunk, reference = balanced(**BIASED), Chunk()

    def choose(layer_number, routes, own, scores):
        reference(tokens())
        return torch.ones(len(routes), dtype=torch.bool)

    with watched(chunk) as seen, mrr.freeze_recompute(reference), mrr.replay(chunk, trace(), choose=choose) as session:
        step(chunk, session)
    assert counters(chunk) == with_live(REPLAYED, seen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_counts_once_and_padding_never_also_in_a_graph_used_twice(kind):
    chunk = balanced(**BIASED)
    chunk.around = KINDS[kind]
    with watched(chunk) as seen, mrr.replay(chunk, trace()) as session:
        losses = [step(chunk, session, number=number) for number in range(3)]
        total = torch.stack(losses).sum()
        total.backward(retain_graph=True)
        total.backward()
    expected = torch.tensor([with_live(REPLAYED, seen, number) for number in range(3)]).sum(0)
    assert counters(chunk) == expected.tolist()
    assert session.report.decisions["counted"] == 3 * 15


@pytest.mark.parametrize("kind", ["plain", "reentrant", "non-reentrant"])
def test_a_backward_after_the_session_counts_as_in_it_and_then_nothing_is_left(kind):
    chunk = balanced(**BIASED)
    chunk.around = KINDS[kind]
    before = [set(vars(router)) for router in chunk.routers]
    with watched(chunk) as seen:
        with mrr.replay(chunk, trace()) as session:
            loss = step(chunk, session)
        loss.backward()
    del loss
    assert counters(chunk) == with_live(REPLAYED, seen)
    assert [set(vars(router)) for router in chunk.routers] == before
    assert not [
        each for each in gc.get_objects() if type(each) is RoutingCall
    ]  # which would hold the scores of a layer
    for router in chunk.routers:
        router.local_tokens_per_expert.zero_()
    chunk.around = plain
    chunk(tokens(2, 3), 0)
    assert [sum(layer) for layer in counters(chunk)] == [12] * 3  # Megatron-Core's own again: six rows


@pytest.mark.parametrize("num_tokens", [6, EXPERTS])
def test_a_padding_mask_of_megatrons_own_is_widened(num_tokens):
    """Megatron-Core 0.16 to 0.19 combine [num_tokens] with [num_tokens, num_experts]: an error, or wrong."""
    chunk = balanced(**BIASED)
    mask = torch.zeros(num_tokens, 1, dtype=torch.bool)
    mask[1] = True
    for layer in chunk.layers:
        layer.router_args = (mask,)
    ids, rows = tokens(1, num_tokens), torch.arange(num_tokens).unsqueeze(0)
    padding = rows == num_tokens - 1
    with watched(chunk) as seen, mrr.record(chunk) as session:
        session.microbatch(rows.masked_fill(padding, -1), padding=padding)
        chunk(ids, 0).square().sum().backward()
    keep = torch.tensor([i not in (1, num_tokens - 1) for i in range(num_tokens)])
    assert counters(chunk) == [seen[0, layer][0][keep].sum(0).tolist() for layer in (1, 2, 3)]


def test_a_replay_inside_a_freeze_counts_once_and_both_leave_nothing():
    chunk = balanced(**BIASED)
    chunk.around = non_reentrant
    before = [set(vars(router)) for router in chunk.routers]
    with mrr.freeze_recompute(chunk), watched(chunk) as seen:
        with mrr.replay(chunk, trace()) as session:
            step(chunk, session).backward()
        assert counters(chunk) == with_live(REPLAYED, seen)
        chunk(tokens(2, 3), 1).square().sum().backward()
        assert [sum(layer) for layer in counters(chunk)] == [10 + 12] * 3
    assert [set(vars(router)) for router in chunk.routers] == before


def test_tokens_that_fill_an_expert_up_to_its_capacity_were_not_routed_to_it():
    options = {
        "moe_expert_capacity_factor": 4.0,
        "moe_pad_expert_input_to_capacity": True,
        "moe_token_drop_policy": "position",
    }
    chunk = balanced(**BIASED, **options)
    with mrr.replay(chunk, trace()) as session:
        session.microbatch(torch.tensor([[0, 1], [2, 3]]))
        chunk(tokens(2, 2), 0).square().sum().backward()
    assert counters(chunk) == REPLAYED


def test_unknown_choices_are_refused_and_off_is_true_of_a_model_without_either():
    chunk = balanced()
    with pytest.raises(TraceError, match=r"expert_bias='live' must be one of 'replayed', 'off'"):
        mrr.replay(chunk, trace(), expert_bias="live")
    with pytest.raises(TraceError, match=r"aux_loss=None must be one of 'live', 'off'"):
        mrr.replay(chunk, trace(), aux_loss=None)
    with mrr.replay(chunk, trace(), expert_bias="off", aux_loss="off") as session:
        step(chunk, session).backward()
    assert "counted" not in session.report.decisions
    assert "bias" not in str(session.report)


OF_LOSS = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}


@pytest.mark.parametrize(
    ("balanced_by", "off", "refused"),
    [
        (BIASED, {}, True),
        (BIASED, {"expert_bias": "off"}, False),
        (OF_LOSS, {}, True),
        (OF_LOSS, {"aux_loss": "off"}, False),
        ({}, {}, False),
    ],
)
def test_padding_of_a_stage_of_mtp_layers_alone_is_refused_where_it_counts(balanced_by, off, refused):
    of = balanced(**balanced_by)
    mtp = bare(MultiTokenPredictionLayer, layer_number=1, mtp_model_layer=of.layers[0])
    stage, chunk = bare(nn.Module, config=of.config, layer=mtp), balanced()
    session = mrr.replay([chunk, stage], trace(), **off)
    session.microbatch(ROWS, stage)  # without a mask there is nothing that could be lost
    if refused:
        with pytest.raises(UnsupportedRouterError, match=r"chunk 1, MTP layer \d+ .*MTP layers alone.*pass mtp=True"):
            session.microbatch(ROWS, stage, padding=PADDING)
    else:
        session.microbatch(ROWS, stage, padding=PADDING)
    mrr.close_sessions([chunk, stage])


def test_tokens_are_counted_where_the_seam_was_put_in_a_second_time(monkeypatch):
    monkeypatch.setattr(
        TopKRouter, "routing", lambda *args, **kwargs: None
    )  # a patch, which ends after a session began
    hooks.install()
    monkeypatch.undo()
    chunk = balanced(**BIASED)
    with mrr.freeze_recompute(chunk):
        chunk(tokens(2, 3)).square().sum().backward()
    assert [sum(counts) for counts in counters(chunk)] == [6 * 2] * 3


def test_tokens_are_counted_once_where_a_patch_that_ended_took_the_wrapper_away(monkeypatch):
    def as_megatron_counts(router, routing_map, padding_mask=None):
        if torch.is_grad_enabled():
            router.local_tokens_per_expert += routing_map.sum(dim=0)

    monkeypatch.setattr(TopKRouter, "_apply_expert_bias", as_megatron_counts)
    chunk = balanced(**BIASED)
    chunk.around = non_reentrant
    with mrr.freeze_recompute(chunk):
        chunk(tokens(2, 3)).square().sum().backward()
    assert [sum(counts) for counts in counters(chunk)] == [6 * 2] * 3
