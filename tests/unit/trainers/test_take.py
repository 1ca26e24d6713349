"""Every container that a trainer may hold gives the same trace, and rows in the container of the tokens."""

import numpy as np
import pytest
import torch

from megatron_router_replay.engines import ModelRoutingInfo
from megatron_router_replay.trainers import take_routes
from tests.unit.trainers.batches import (
    INFO,
    LENGTHS,
    ROWS,
    assert_exact,
    attention_mask,
    engine_routes,
    nested,
    padded,
    token_ids,
    with_row,
)

STRIDED = torch.strided


@pytest.mark.parametrize("extra", [None, 0, -1], ids=["T - 1 rows", "T rows, 0", "T rows, -1"])
@pytest.mark.parametrize("layout", [torch.jagged, STRIDED], ids=["jagged", "strided"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_routes_beside_nested_tokens(extra, layout):
    samples = engine_routes()
    given = samples if extra is None else with_row(samples, extra)
    tokens = nested(token_ids(), layout)
    # torch makes no strided nested tensor of a part without rows.
    routes = given if layout is STRIDED and extra is None else nested(given, layout)
    taken = take_routes(routes, INFO, tokens=tokens)
    assert_exact(taken.trace, samples)
    assert taken.rows.is_nested
    assert taken.rows.layout is layout
    assert [part.tolist() for part in taken.rows.unbind()] == ROWS
    assert torch.equal(taken.trace.token_ids.long(), torch.cat(token_ids()))
    assert (taken.num_absent, taken.num_lost) == (0, 0)


def test_jagged_rows_share_the_offsets_of_the_tokens():
    tokens = nested(token_ids())
    rows = take_routes(nested(with_row(engine_routes(), 0)), INFO, tokens=tokens).rows
    assert (rows + tokens).unbind()[2].tolist() == [300 + i + 6 + i for i in range(8)]
    assert rows.shape == tokens.shape


def test_a_jagged_view_with_holes_counts_its_tokens_alone():
    lengths, starts = torch.tensor(LENGTHS), torch.tensor([1, 0, 1])
    buffer = torch.full((3, 9), 999)
    for row, start, part in zip(buffer, starts, token_ids()):
        row[start : start + len(part)] = part
    tokens = torch.nested.narrow(buffer, 1, starts, lengths, layout=torch.jagged)
    taken = take_routes(engine_routes(), INFO, tokens=tokens)
    assert_exact(taken.trace, engine_routes())
    assert taken.trace.token_ids.tolist() == torch.cat(token_ids()).tolist()
    assert [part.tolist() for part in taken.rows.unbind()] == ROWS


@pytest.mark.parametrize("size", [9, 8], ids=["S", "S - 1"])
@pytest.mark.parametrize("fill", [0, -1], ids=["0", "-1"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_routes_stand_where_the_tokens_stand(side, fill, size):
    samples = engine_routes(dtype=torch.int32)
    tokens, mask = padded(token_ids(), side=side, fill=7), attention_mask(side=side)
    given = padded(with_row(samples, fill), side=side, fill=fill)[:, :size]
    taken = take_routes(given, INFO, tokens=tokens, attention_mask=mask)
    assert_exact(taken.trace, samples)
    assert taken.rows.tolist() == padded([torch.tensor(rows) for rows in ROWS], side=side, fill=-1).tolist()


@pytest.mark.parametrize("size", [7, 8, 9, 64])
def test_padding_behind_the_samples_may_be_of_any_length(size):
    """A trainer that pads routes to the longest sample, or tokens to a multiple."""
    samples = engine_routes()
    taken = take_routes(padded(samples, size=size), INFO, tokens=padded(token_ids()), lengths=torch.tensor(LENGTHS))
    assert_exact(taken.trace, samples)


def test_filler_of_distinct_experts_on_padding_and_on_the_last_token():
    """SkyRL and NeMo-RL put experts 0, 1, ... on every position without a route."""
    samples = engine_routes()
    given = torch.arange(2).expand(3, 9, 10, 2).clone()
    for row, part in zip(given, samples):
        row[: len(part)] = part
    taken = take_routes(given, INFO, attention_mask=attention_mask())
    assert_exact(taken.trace, samples)
    assert taken.trace.token_ids is None


def test_a_copied_last_row_is_filler_where_the_trainer_is_said_to_copy():
    given = [torch.cat([part, part[-1:]]) for part in engine_routes()]
    assert_exact(take_routes(given, INFO, lengths=LENGTHS, last_row="copied").trace, engine_routes())
    assert_exact(
        take_routes(with_row(engine_routes(), 0), INFO, lengths=LENGTHS, last_row="copied").trace, engine_routes()
    )


def test_a_list_beside_padded_tokens_and_lists_beside_lists():
    samples = [part.numpy() for part in engine_routes(dtype=torch.int32)]
    taken = take_routes(
        samples, INFO, tokens=padded(token_ids(), side="left"), attention_mask=attention_mask(side="left")
    )
    assert_exact(taken.trace, engine_routes())
    assert taken.rows[0].tolist() == [-1, -1, -1, -1, 0, 1, 2, 3, 4]
    taken = take_routes(samples, INFO, tokens=[part.numpy() for part in token_ids()])
    assert_exact(taken.trace, engine_routes())
    assert [part.tolist() for part in taken.rows] == ROWS
    # numpy holds ragged samples in an array of objects.
    objects = np.empty(3, dtype=object)
    objects[:] = samples
    assert_exact(take_routes(objects, INFO, lengths=LENGTHS).trace, engine_routes())


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64], ids=str
)
def test_any_integer_dtype(dtype):
    taken = take_routes(engine_routes(dtype=dtype), INFO, lengths=LENGTHS)
    assert_exact(taken.trace, engine_routes())


def test_more_than_256_experts_are_stored_in_int16():
    info = ModelRoutingInfo(num_layers=10, moe_layer_numbers=tuple(range(1, 11)), num_experts=512, topk=2)
    routes = [part.flip(1) + 300 for part in engine_routes()]
    for part in routes:
        part[:, -1] = torch.tensor([511, 0])
    trace = take_routes(routes, info, lengths=LENGTHS).trace
    assert trace.topk_indices.dtype is torch.int16
    assert torch.equal(trace.topk_indices[:4].long(), routes[0])


def test_the_moe_layers_alone_and_named_columns():
    samples = engine_routes()
    assert_exact(take_routes(engine_routes(moe_only=True), INFO, lengths=LENGTHS).trace, samples)
    # A trainer that keeps layers 3..6 for a pipeline stage, with a column of something else in front.
    sliced = [torch.cat([part[:, :1] + 9, part[:, 2:6]], dim=1) for part in samples]
    trace = take_routes(sliced, INFO, lengths=LENGTHS, layer_numbers=[0, 3, 4, 5, 6]).trace
    assert trace.layer_numbers == (3, 4, 5, 6)
    assert torch.equal(trace.topk_indices[:4].long(), samples[0][:, 2:6])


def test_a_recording_has_a_route_for_every_token():
    samples = [torch.rand(length, 10, 16).argsort(dim=2)[:, :, :2] for length in LENGTHS]
    for part in samples:
        part[:, 0] = 0
    taken = take_routes(nested(samples), INFO, lengths=LENGTHS, last_row="replayed")
    assert bool(taken.trace.replay_mask.all())
    assert torch.equal(taken.trace.topk_indices.long(), torch.cat(samples)[:, 1:])


def test_samples_that_were_cut_keep_the_route_of_their_last_token_where_it_is_one():
    samples = with_row(engine_routes(), 0)
    cut = engine_routes(seed=1)[2][:5]  # of eight tokens, five were kept
    taken = take_routes([cut, *samples[1:]], INFO, lengths=LENGTHS, last_row="unchecked")
    assert taken.trace.replay_mask[:5].tolist() == [True] * 5
    assert torch.equal(taken.trace.topk_indices[:5].long(), cut[:, 1:])
    assert taken.trace.replay_mask[[5, 13]].tolist() == [False, False]
    cut[4] = cut[3]  # two equal tokens at the end of what was kept
    taken = take_routes([cut, *samples[1:]], INFO, lengths=LENGTHS, last_row="unchecked")
    assert taken.trace.replay_mask[:5].tolist() == [True] * 5


@pytest.mark.parametrize("as_counts", [True, False])
def test_tokens_that_rightly_have_no_route_are_named(as_counts):
    """The last turn's observation was never fed to the engine: three tokens of the last sample."""
    samples = with_row(engine_routes(), 0)
    samples[2][5:] = 0
    routed = torch.tensor([4, 0, 5]) if as_counts else nested([torch.arange(t) < n for t, n in zip(LENGTHS, (4, 0, 5))])
    taken = take_routes(nested(samples), INFO, tokens=nested(token_ids()), has_route=routed)
    assert taken.trace.replay_mask.tolist() == [True] * 4 + [False] * 2 + [True] * 5 + [False] * 3
    assert (taken.num_absent, taken.num_lost) == (2, 0)  # the last token of a sample never has one


def test_missing_routes_are_live_in_every_layer_and_counted_where_asked_for():
    samples = engine_routes()
    samples[0][1] = -1
    samples[2][3, 7] = 5  # lost in one layer
    samples[2][4, 1:] = -1
    taken = take_routes(samples, INFO, lengths=LENGTHS, missing="live")
    live = (~taken.trace.replay_mask).nonzero()[:, 0].tolist()
    assert live == [1, 4, 5, 9, 10, 13]
    assert (taken.num_absent, taken.num_lost) == (2, 1)
    assert torch.equal(taken.trace.topk_indices[8].long(), samples[2][2, 1:])


def test_weight_versions_of_samples():
    trace = take_routes(engine_routes(), INFO, lengths=LENGTHS, weight_version=[3, 4, 5]).trace
    assert trace.weight_version.tolist() == [3] * 5 + [4] + [5] * 8
    assert (
        take_routes(engine_routes(), INFO, lengths=LENGTHS, weight_version=9).trace.weight_version.tolist() == [9] * 14
    )


def test_the_trace_is_a_copy_of_what_the_trainer_reuses():
    samples = engine_routes(dtype=torch.uint8, moe_only=True)
    tokens = torch.cat(token_ids())
    taken = take_routes(samples, INFO, tokens=list(tokens.split(LENGTHS)))
    for part in samples:
        part.zero_()
    tokens.zero_()
    assert_exact(taken.trace, engine_routes())
    assert taken.trace.token_ids[:5].tolist() == [100, 101, 102, 103, 104]
