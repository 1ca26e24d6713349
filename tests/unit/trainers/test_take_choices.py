"""Versions and masks by the tokens' container, token by token; every mistake that would choose other rows raises."""

import numpy as np
import pytest
import torch

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.trainers import take_routes
from tests.unit.trainers.batches import (
    INFO,
    LENGTHS,
    attention_mask,
    engine_routes,
    nested,
    padded,
    token_ids,
)

# Sample 0 has 5 tokens, sample 1 one token and no route, sample 2 eight. Row 4, 5 and 13 are last tokens.
VERSIONS = [torch.tensor([4, 4, 5, 7, 7]), torch.tensor([7]), torch.tensor([6, 6, 6, 6, 7, 7, 7, 7])]
FLAT = [4, 4, 5, 7, 7, 7, 6, 6, 6, 6, 7, 7, 7, 7]


@pytest.mark.parametrize(
    "container",
    [
        {"tokens": nested(token_ids()), "weight_version": nested(VERSIONS)},
        {"tokens": nested(token_ids()), "weight_version": [part.tolist() for part in VERSIONS]},
        {
            "tokens": padded(token_ids(), side="left"),
            "attention_mask": attention_mask(side="left"),
            "weight_version": padded(VERSIONS, side="left", fill=99).numpy(),
        },
        {"lengths": LENGTHS, "weight_version": [part.numpy() for part in VERSIONS]},
    ],
    ids=["jagged", "jagged and lists", "padded on the left", "lists of numpy"],
)
def test_a_partial_rollouts_versions_go_token_by_token(container):
    assert take_routes(engine_routes(), INFO, **container).trace.weight_version.tolist() == FLAT


@pytest.mark.parametrize(("version", "expected"), [(5, [5] * 14), ([5, 7, 6], [5] * 5 + [7] + [6] * 8)])
def test_one_version_for_the_batch_or_a_sample(version, expected):
    trace = take_routes(engine_routes(), INFO, lengths=LENGTHS, weight_version=version).trace
    assert trace.weight_version.tolist() == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight_version": [4, 5.0, 6]},
        {"weight_version": [4, True, 6]},
        {"weight_version": [4, "5", 6]},
        {"weight_version": ["4", "5", "6"]},
        {"weight_version": 4.7},
        {"weight_version": True},
        {"weight_version": torch.tensor([4.0, 5.0, 6.0])},
        {"weight_version": [VERSIONS[0].float(), *VERSIONS[1:]]},
    ],
    ids=str,
)
def test_versions_of_mixed_or_other_types_raise(wrong):
    with pytest.raises(LayoutError, match="weight_version must hold integers"):
        take_routes(engine_routes(), INFO, lengths=LENGTHS, **wrong)


def test_versions_of_another_number_raise():
    for wrong, message in (
        ([4, 5], r"must be an int, one for each of 3 samples"),
        ([4, VERSIONS[1], VERSIONS[2]], r"one version for sample 0 and several for sample 1"),
        ([VERSIONS[0][:4], VERSIONS[1], VERSIONS[2]], r"the first that differs is sample 0"),
        ([part.unsqueeze(1) for part in VERSIONS], r"weight_version of sample 0 is \[5, 1\]"),
        (2**31, "which int32 cannot hold"),
    ):
        with pytest.raises(LayoutError, match=message):
            take_routes(engine_routes(), INFO, lengths=LENGTHS, weight_version=wrong)


MASK = [torch.tensor([1, 0, 1, 1, 0]), torch.tensor([1]), torch.tensor([0, 1, 1, 1, 1, 1, 1, 0])]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_mask_in_the_tokens_container_keeps_their_routes(side):
    mask = [part.bool() for part in MASK]
    where = {"tokens": padded(token_ids(), side=side), "attention_mask": attention_mask(side=side)}
    for given, keep in (
        ({"tokens": nested(token_ids())}, nested(mask)),
        (where, padded(mask, side=side)),
        ({"lengths": LENGTHS}, [part.numpy() for part in mask]),
    ):
        kept = take_routes(engine_routes(), INFO, **given).keep(keep)
        # Rows 1 and 6 are not kept; rows 4, 5 and 13 never had a route.
        assert (~kept.trace.replay_mask).nonzero()[:, 0].tolist() == [1, 4, 5, 6, 13]
        assert torch.equal(kept.trace.topk_indices[:4].long(), engine_routes()[0][:, 1:])


def test_masks_that_would_keep_other_tokens_raise():
    keep = [torch.tensor([True] * length) for length in LENGTHS]
    batch = {"tokens": padded(token_ids(), side="left"), "attention_mask": attention_mask(side="left")}
    left, listed = (take_routes(engine_routes(), INFO, **given) for given in (batch, {"lengths": LENGTHS}))
    for routes, mask, message in (
        (left, padded(keep, side="right"), "positions that hold no token: is it padded on another side"),
        (left, attention_mask(side="left"), "keep must be bool"),  # log-probs, advantages, ...
        (left, torch.ones(14, dtype=torch.bool), "keep"),
        (listed, [keep[2], keep[1], keep[0]], "the first that differs is sample 0"),
        (listed, [np.ones((t, 1), np.bool_) for t in LENGTHS], "keep must be bool"),
    ):
        with pytest.raises(LayoutError, match=message):
            routes.keep(mask)
