"""Token ids that travel with routes, as more layers; sequences of a recording by their tokens."""

import re

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import PayloadError, ReplayStateError
from megatron_router_replay.trainers import nemo_rl, skyrl, token_layers, verl
from tests.trainers import oracle

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize("topk", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_token_ids_travel_with_routes_of_any_topk(topk, dtype):
    ids = torch.tensor([0, 5, 255, 256, 70_000, 151_000])
    routes = torch.arange(6 * 2 * topk).view(6, 2, topk).to(dtype)
    values = token_layers.add(routes[:5], ids, sample=0)
    assert values.shape == (5, 2 + {1: 3, 2: 2}.get(topk, 1), topk)
    for filler in (torch.zeros(topk), torch.arange(topk)):
        filled = torch.cat([values, filler.to(dtype).expand(1, values.shape[1], topk)])
        back = token_layers.remove(filled, ids, sample=0)
        assert torch.equal(back[:5], routes[:5].to(torch.int16))
        assert bool((back[5] == -1).all())


def test_a_message_without_tokens_is_joined_with_the_others():
    """As NeMo-RL does: an observation may be empty, and newer NeMo-RLs give every message rows of routes."""
    log = [
        {"token_ids": torch.arange(length), "routed_experts": torch.ones(length, 3, 2, dtype=torch.int16)}
        for length in (2, 0, 3)
    ]
    nemo_rl._add_tokens(log, sample=0)
    values, ids = (torch.cat([message[name] for message in log]) for name in ("routed_experts", "token_ids"))
    assert torch.equal(token_layers.remove(values, ids, sample=0, at_least=5), torch.ones(5, 3, 2, dtype=torch.int16))


def travelled(topk=2, rows=5, dtype=torch.int16):
    """Six tokens, and the values of their first rows."""
    ids = torch.tensor([0, 5, 255, 256, 70_000, 1_000_000])
    return ids, token_layers.add((torch.arange(rows * 3 * topk) % 7).view(rows, 3, topk).to(dtype), ids, sample=4)


def filled(values, rows, filler):
    """Return values with rows of a trainer's filler at the end, as it pads a sample."""
    topk = values.shape[2]
    row = torch.arange(topk) if filler == "arange" else torch.full((topk,), filler)
    return torch.cat([values, row.to(values.dtype).expand(rows, values.shape[1], topk)])


@pytest.mark.parametrize("topk", [1, 2, 3, 8])
@pytest.mark.parametrize("filler", [0, -1, "arange"])
def test_rows_that_a_trainer_fills_have_no_route(topk, filler):
    ids, values = travelled(topk)
    routes = token_layers.remove(filled(values, 1, filler), ids, sample=4, at_least=5)
    assert torch.equal(routes[:5], values[:, :3])
    assert bool((routes[5:] == -1).all())


@pytest.mark.parametrize("topk", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            lambda values: values[[0, 2, 1, 3, 4]],
            "the routes at position 1, token 5, carry the id 255 (2 of 6 rows are so)",
        ),
        (lambda values: values[[1, 2, 3, 4]], "the routes at position 0, token 0, carry the id 5 (4 of 6 rows are so)"),
        (
            lambda values: values[:4],
            "4 of 6 positions have one, 1 are needed, and the last row of the sample is missing",
        ),
        (
            lambda values: values[:0],
            "0 of 6 positions have one, 1 are needed, and the last row of the sample is missing",
        ),
        (
            lambda values: torch.cat([values[:2], filled(values[:0], 1, -1), values[3:]]),
            "4 of 6 positions have one, 1 are needed, and the last row of the sample is at position 4",
        ),
    ],
)
def test_rows_that_were_moved_or_lost_raise(topk, damage, text):
    ids, values = travelled(topk)
    values = damage(values)
    with pytest.raises(PayloadError, match=rf"MRR802: sample 4: .*{re.escape(text)}"):
        token_layers.remove(filled(values, 6 - len(values), -1), ids, sample=4)


@pytest.mark.parametrize("bit", range(24))
def test_an_id_that_differs_in_one_bit_raises(bit):
    ids, values = travelled(rows=6)
    ids[4] ^= 1 << bit
    with pytest.raises(PayloadError, match=r"the routes at position 4, .* carry the id 70000 "):
        token_layers.remove(values, ids, sample=4)


def test_too_few_rows_for_the_trained_tokens_raise_on_both_ways():
    ids, values = travelled()
    with pytest.raises(PayloadError, match=r"5 of 6 positions have one, 6 are needed, .* is at position 4"):
        token_layers.remove(filled(values, 1, 0), ids, sample=4, at_least=6)
    for rows, at_least in ((0, 0), (3, 4), (7, 1)):
        routes = torch.zeros(rows, 3, 2, dtype=torch.int16)
        with pytest.raises(PayloadError, match=rf"sample 4 has 6 tokens.* with {max(1, at_least)} rows at least"):
            token_layers.add(routes, ids, sample=4, at_least=at_least)
    assert len(token_layers.add(torch.zeros(3, 3, 2, dtype=torch.int16), ids, sample=4, at_least=3)) == 3


@pytest.mark.parametrize("topk", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_metrics_tell_routes_with_ids_from_those_without(topk, dtype):
    _, values = travelled(topk, dtype=dtype)
    batch = torch.stack([filled(values, 2, 0), filled(values, 2, 0)])
    routes = token_layers.without(batch)
    assert torch.equal(routes, batch[..., :3, :])
    assert (token_layers.are_in(batch), token_layers.are_in(routes)) == (True, False)
    assert not token_layers.are_in(torch.zeros_like(batch))


@pytest.mark.parametrize("topk", [1, 4])
def test_a_sample_without_tokens_has_no_rows(topk):
    values, ids = torch.zeros(0, 5, topk, dtype=torch.int16), torch.zeros(0, dtype=torch.int64)
    assert token_layers.remove(values, ids, sample=0, at_least=0).shape == (0, {1: 2, 4: 4}[topk], topk)


@pytest.mark.parametrize("name", ["skyrl"])
def test_a_sample_of_skyrl_that_was_never_generated_is_named(name, trainer):
    reply = {"prompt_token_ids": [[1, 2]], "response_ids": [[]], "loss_masks": [[]], "rollout_expert_indices": [None]}
    with pytest.raises(PayloadError, match="MRR802: sample 0 has 2 tokens, and no routes"):
        skyrl._with_tokens(reply, eos_token_id=2)


@pytest.mark.parametrize("name", ["skyrl"])
def test_only_before_an_eos_that_skyrl_appends_may_a_trained_token_of_it_lack_a_row(name, trainer):
    """The engine sampled token 6 last and did not run it; SkyRL appends and trains the EOS, 2."""

    def num_rows(response, rows):
        reply = {"prompt_token_ids": [[4, 5]], "response_ids": [response], "loss_masks": [[1] * len(response)]}
        rows = torch.arange(oracle.TOPK).expand(rows, 2, -1).numpy()
        return len(skyrl._with_tokens(reply | {"rollout_expert_indices": [rows]}, eos_token_id=2)[0])

    assert (num_rows([6, 2], 2), num_rows([6, 2], 3), num_rows([6, 7], 3)) == (2, 3, 3)
    for response, rows in (([6, 2], 1), ([6, 7], 2)):
        with pytest.raises(PayloadError, match=rf"MRR802: sample 0 has 4 tokens, .* with {rows + 1} rows at least"):
            num_rows(response, rows)


def recorded(routes, lengths):
    """A recording of sequences [5, 6, ..., padded with 0], one of each length, with these routes."""
    rows = torch.cat([each[:length] for each, length in zip(routes, lengths)])
    tokens = torch.cat([torch.cat([torch.arange(5, 45), torch.zeros(length - 40)]) for length in lengths]).int()
    return mrr.RoutingTrace(
        topk_indices=rows, layer_numbers=[1, 2], num_experts=32, token_ids=tokens, sequence_lengths=lengths
    )


def test_sequences_of_verl_with_equal_tokens_have_one_image():
    one, other = (
        torch.rand(48, 2, 32, generator=torch.Generator().manual_seed(seed)).topk(4).indices for seed in (0, 1)
    )
    ((tokens, longest),) = verl._by_tokens(recorded([one, one, one], [40, 48, 44])).items()
    assert tokens == tuple(range(5, 45))
    assert torch.equal(longest.topk_indices, one.to(torch.uint8))
    with pytest.raises(
        ReplayStateError, match=r"MRR208: two samples .* the same 40 tokens, and they have different routes"
    ):
        verl._by_tokens(recorded([one, one, other], [48, 40, 44]))
