"""Which layers of fed routes tell whether a row holds a route: those of the model that route, and no others."""

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError
from tests.unit.mcore.tiny_chunk import Chunk, as_map, random_routes, tokens, watched

IDS = tokens()  # [2, 4]
FILLER = torch.tensor([0, 1])


def routes_behind(first_column):
    """[2, 4, 3, 2] routes of layers 2 and 3; layer 1 holds `first_column`."""
    routes = random_routes(8).view(2, 4, 3, 2)
    routes[:, :, 0] = first_column
    return routes


def layers_2_and_3(**options):
    chunk = Chunk(**options)
    chunk.layers = chunk.layers[1:]
    return chunk


def check_replay(chunk, routes, *, live=(), padding=None, **options):
    """Every row but those of `live`, (b, s) each, and padding is exactly the routes'."""
    unknown = torch.zeros(2, 4, dtype=torch.bool) if padding is None else padding.clone()
    for place in live:
        unknown[place] = True
    with watched(chunk) as seen, mrr.replay(chunk) as session:
        mrr.microbatch(chunk, routes=routes, trust_layout=True, padding=padding, **options)
        chunk(IDS)
    known = ~unknown.t().reshape(-1)
    for (_, layer), (routing_map,) in seen.items():
        expected = as_map(routes[:, :, layer - 1].transpose(0, 1).reshape(8, 2).clamp(0, 7))
        assert torch.equal(routing_map[known], expected[known])
    report = session.report
    assert (report.rows_replayed, report.rows_live) == (int(known.sum()), len(live))


@pytest.mark.parametrize("dense", [0, -1])
def test_a_trainers_filler_may_stand_in_dense_layers_of_rows_without_a_route(dense):
    routes = routes_behind(dense)
    routes[0, 1] = routes[1, 3] = FILLER
    check_replay(layers_2_and_3(moe_layer_freq=[0, 1, 1]), routes, live=[(0, 1), (1, 3)], filler=FILLER)


def test_dense_layers_of_padding_are_not_looked_at():
    routes, padding = routes_behind(0), torch.zeros(2, 4, dtype=torch.bool)
    padding[0, 3] = True
    routes[0, 3] = torch.tensor([5, 6])
    check_replay(layers_2_and_3(moe_layer_freq=[0, 1, 1]), routes, padding=padding)


def test_a_route_in_a_dense_layer_beside_rows_of_filler_raises():
    routes = routes_behind(0)
    routes[0, 1] = FILLER
    routes[1, 2, 0] = torch.tensor([5, 6])
    chunk = layers_2_and_3(moe_layer_freq=[0, 1, 1])
    with pytest.raises(LayoutError, match=r"dense layers \[1\] are not filler"), mrr.replay(chunk):
        mrr.microbatch(chunk, routes=routes, trust_layout=True, filler=FILLER)
    mrr.close_sessions(chunk)


def test_hash_layers_do_not_tell_whether_a_row_holds_a_route():
    chunk = layers_2_and_3()
    chunk.config.moe_n_hash_layers = 1
    routes = routes_behind(0)
    routes[0, 1, 1:] = -1
    check_replay(chunk, routes, live=[(0, 1)])


@pytest.mark.parametrize("columns", [slice(0, 3), slice(1, 3)], ids=["all layers", "the MoE layers"])
def test_the_routers_config_counts_the_layers_where_the_model_has_none(columns):
    chunk = layers_2_and_3(moe_layer_freq=[0, 1, 1])
    del chunk.config  # as an actor-critic's model, which holds the language model and no config
    routes = routes_behind(0)
    with watched(chunk) as seen, mrr.replay(chunk):
        mrr.microbatch(chunk, routes=routes[:, :, columns], trust_layout=True)
        chunk(IDS)
    for (_, layer), (routing_map,) in seen.items():
        assert torch.equal(routing_map, as_map(routes[:, :, layer - 1].transpose(0, 1).reshape(8, 2)))


def test_255_in_a_dense_layer_is_no_filler():
    """torch takes 255 for -1 where it compares uint8 with a number."""
    chunk = layers_2_and_3(moe_layer_freq=[0, 1, 1])
    with pytest.raises(LayoutError, match=r"dense layers \[1\] are not filler"), mrr.replay(chunk):
        mrr.microbatch(chunk, routes=routes_behind(0).to(torch.uint8).index_fill(2, ZERO, 255), trust_layout=True)


ZERO = torch.tensor([0])
FAULTS = {
    "none": lambda rows: rows,
    "another expert in one layer of filler": lambda rows: rows.index_fill(0, ZERO, 0) + torch.tensor([0, 1]),
    "a layer is missing": lambda rows: rows.index_fill(0, torch.tensor([2]), -1),
    "the first layer is missing": lambda rows: rows.index_fill(0, ZERO, -1),
    "one id is missing": lambda rows: rows * torch.tensor([1, 0]) - torch.tensor([0, 1]),
    "an id too high": lambda rows: rows.index_fill(0, torch.tensor([1]), 8),
    "an expert twice in the last layer": lambda rows: rows.index_fill(0, torch.tensor([2]), 3),
    "no route": lambda rows: rows * 0 - 1,
    "filler": lambda rows: rows * 0 + FILLER,
}


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("is_padding", [False, True])
def test_each_row_is_replayed_live_or_refused_as_a_plain_reading_of_it_says(fault, is_padding, dtype):
    routes, padding = random_routes(8).view(2, 4, 3, 2), torch.zeros(2, 4, dtype=torch.bool)
    routes[1, 2] = row = FAULTS[fault](routes[1, 2])
    padding[1, 2] = is_padding
    layers = row.tolist()
    is_live = all(layer == [0, 1] for layer in layers) or all(each < 0 for layer in layers for each in layer)
    is_legal = all(0 <= each < 8 and layer.count(each) == 1 for layer in layers for each in layer)
    if not (is_live or is_legal or is_padding):
        with pytest.raises(LayoutError, match="MRR103"), mrr.replay(Chunk()) as session:
            session.microbatch(routes=routes.to(dtype), trust_layout=True, padding=padding, filler=FILLER)
        return
    live = [(1, 2)] if is_live and not is_padding else []
    check_replay(Chunk(), routes.to(dtype), live=live, padding=padding, filler=FILLER)
