"""take_routes(keep=, stale=): by the tokens' container, token by token; every mistake that would choose other rows raises."""

import numpy as np
import pytest
import torch

from megatron_router_replay.errors import LayoutError, TraceError
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
AGE = {"stale": "live", "max_age": 1, "trainer_version": 7}
STALE = [0, 1, 2]


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
    routes = take_routes(engine_routes(), INFO, **container, **AGE)
    assert routes.trace.weight_version.tolist() == FLAT
    assert routes.trace.left_live.nonzero()[:, 0].tolist() == STALE
    assert routes.trace.replay_mask.tolist() == [False] * 3 + [True] + [False] * 2 + [True] * 7 + [False]
    assert (routes.num_stale, routes.num_not_kept, routes.num_absent, routes.num_lost) == (3, 0, 0, 0)
    # What is not replayed is still there, with its token.
    assert torch.equal(routes.trace.topk_indices[:4].long(), engine_routes()[0][:, 1:])


def test_stale_routes_that_are_replayed_are_counted_and_those_that_raise_name_sample_and_token():
    given = {"lengths": LENGTHS, "weight_version": VERSIONS, "max_age": 0, "trainer_version": 7}
    routes = take_routes(engine_routes(), INFO, **given, stale="replay")
    assert routes.num_stale == 3 + 4
    assert routes.trace.left_live is None
    assert int(routes.trace.replay_mask.sum()) == 11
    given["weight_version"] = [torch.full((5,), 7), *VERSIONS[1:]]
    with pytest.raises(
        TraceError, match=r"4 rows .* row 6 \(token 0 of sample 2\), of weight_version=6, 1 versions behind"
    ):
        take_routes(engine_routes(), INFO, **given, stale="raise")


@pytest.mark.parametrize(
    ("version", "stale"), [(5, [0, 1, 2, 3, 6, 7, 8, 9, 10, 11, 12]), ([5, 7, 7], [0, 1, 2, 3]), (6, [])]
)
def test_one_version_for_the_batch_or_a_sample(version, stale):
    routes = take_routes(engine_routes(), INFO, lengths=LENGTHS, weight_version=version, **AGE)
    assert routes.trace.left_live.nonzero()[:, 0].tolist() == stale


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


def test_what_is_too_old_takes_all_three():
    for given in ({"stale": "live"}, {"max_age": 1}, {"trainer_version": 7}, {"stale": "live", "max_age": 1}):
        with pytest.raises(LayoutError, match="takes all three of stale, max_age and trainer_version"):
            take_routes(engine_routes(), INFO, lengths=LENGTHS, weight_version=7, **given)
    with pytest.raises(TraceError, match="stale='keep' must be one of"):
        take_routes(engine_routes(), INFO, lengths=LENGTHS, weight_version=7, **(AGE | {"stale": "keep"}))
    with pytest.raises(TraceError, match="no weight_version"):
        take_routes(engine_routes(), INFO, lengths=LENGTHS, **AGE)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_mask_in_the_tokens_container_keeps_their_routes(side):
    mask = [torch.tensor([1, 0, 1, 1, 0]), torch.tensor([1]), torch.tensor([0, 1, 1, 1, 1, 1, 1, 0])]
    mask = [part.bool() for part in mask]
    for given in (
        {"tokens": nested(token_ids()), "keep": nested(mask)},
        {
            "tokens": padded(token_ids(), side=side),
            "attention_mask": attention_mask(side=side),
            "keep": padded(mask, side=side),
        },
        {"lengths": LENGTHS, "keep": [part.numpy() for part in mask]},
    ):
        routes = take_routes(engine_routes(), INFO, **given, weight_version=VERSIONS, **AGE)
        # Rows 1 and 6 are not kept; 0 and 2 are too old; row 13 was not kept either, and never had a route.
        assert routes.trace.left_live.tolist() == [2, 1, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
        assert (routes.num_not_kept, routes.num_stale) == (2, 2)


def test_masks_that_would_keep_other_tokens_raise():
    keep = [torch.tensor([True] * length) for length in LENGTHS]
    batch = {"tokens": padded(token_ids(), side="left"), "attention_mask": attention_mask(side="left")}
    with pytest.raises(LayoutError, match="positions that hold no token: is it padded on another side"):
        take_routes(engine_routes(), INFO, **batch, keep=padded(keep, side="right"))
    with pytest.raises(LayoutError, match="keep must be bool"):
        take_routes(engine_routes(), INFO, **batch, keep=attention_mask(side="left"))  # log-probs, advantages, ...
    with pytest.raises(LayoutError, match="keep"):
        take_routes(engine_routes(), INFO, **batch, keep=torch.ones(14, dtype=torch.bool))
    with pytest.raises(LayoutError, match="the first that differs is sample 0"):
        take_routes(engine_routes(), INFO, lengths=LENGTHS, keep=[keep[2], keep[1], keep[0]])
    with pytest.raises(LayoutError, match="keep must be bool"):
        take_routes(engine_routes(), INFO, lengths=LENGTHS, keep=[np.ones((t, 1), np.bool_) for t in LENGTHS])
