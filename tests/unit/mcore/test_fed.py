"""Routes that a trainer lays out and feeds at its micro-batch: exact, proved by a stamp, or refused."""

import pytest
import torch
from torch import nn

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, ReplayStateError
from tests.unit.mcore.tiny_chunk import (
    Chunk,
    as_map,
    disturb,
    flips,
    non_reentrant,
    num_recomputed,
    random_routes,
    reentrant,
    tokens,
    watched,
)

IDS = tokens()  # [2, 4]
ROUTES = random_routes(8).view(2, 4, 3, 2)


def wrong(seen, routes=ROUTES, live=None):
    """How many decisions are not those of [b, s, 3, 2] routes; rows where `live` holds, [b, s], are left out."""
    known = torch.ones(8, dtype=torch.bool) if live is None else ~live.t().reshape(-1)
    count = 0
    for (_, layer), maps in seen.items():
        expected = as_map(routes.transpose(0, 1).reshape(8, 3, 2)[:, layer - 1].clamp(0, 7))
        count += sum(int((routing_map[known] != expected[known]).any(dim=1).sum()) for routing_map in maps)
    return count


def stamped(routes=ROUTES, ids=IDS):
    return mrr.stamp(routes, ids, num_experts=8)


PROVED = {"stamped": True, "token_ids": IDS}
TRUSTED = {"trust_layout": True}


def replayed(chunk, routes, ids=IDS, *, min_replayed=None, **given):
    """One replayed forward: what was routed, and the report."""
    with watched(chunk) as seen, mrr.replay(chunk, min_replayed=min_replayed) as session:
        mrr.microbatch(chunk, routes=routes, **given)
        chunk(ids)
    return seen, session.report


def refused(chunk, routes, message, **given):
    session = mrr.replay(chunk)
    with pytest.raises(LayoutError, match=message):
        mrr.microbatch(chunk, routes=routes, **given)
    session.close(verify=False)
    assert session.report.rows_replayed == 0


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("around", [reentrant, non_reentrant])
def test_stamped_routes_are_exact_in_forward_and_recompute(around, dtype):
    chunk = Chunk()
    chunk.around = around
    with watched(chunk) as seen, mrr.replay(chunk, min_replayed=1.0) as session:
        mrr.microbatch(chunk, routes=stamped(ROUTES.to(dtype)), stamped=True, token_ids=IDS)
        loss = chunk(IDS).square().sum()
        disturb(chunk)
        loss.backward()
    assert (wrong(seen), flips(seen), num_recomputed(seen)) == (0, 0, 3)
    assert (session.report.rows_replayed, session.report.layout_proved) == (8, True)


@pytest.mark.parametrize(
    ("order", "shape", "message"),
    [
        *((lambda r, dims=dims: r.flip(dims), (2, 4), "of other tokens than the model gets at") for dims in (0, 1)),
        (lambda r: r.roll(1, 1), (2, 4), "of other tokens than the model gets at their positions"),
        (lambda r: r.transpose(0, 1), (4, 4), "in another order than tokens"),
    ],
    ids=["samples", "backwards", "one late", "transposed"],
)
def test_another_layout_than_the_tokens_is_told_by_the_stamp(order, shape, message):
    ids = torch.arange(32)[: shape[0] * shape[1]].view(shape)
    routes = order(stamped(random_routes(ids.numel()).view(*shape, 3, 2), ids))
    refused(Chunk(), routes, message, stamped=True, token_ids=ids)


def test_a_layout_is_proved_or_trusted_by_word():
    chunk = Chunk()
    with mrr.replay(chunk) as session:
        for options in ({}, {"stamped": True, "trust_layout": True}):
            with pytest.raises(LayoutError, match="say trust_layout=True in its place"):
                mrr.microbatch(chunk, routes=ROUTES, token_ids=IDS, **options)
        with pytest.raises(LayoutError, match="give token_ids="):
            mrr.microbatch(chunk, routes=stamped(), stamped=True)
        mrr.microbatch(chunk, routes=ROUTES, trust_layout=True)
        chunk(IDS)
    assert not session.report.layout_proved
    assert "layout of routes" in str(session.report)


@pytest.mark.parametrize("shape", [(8, 3, 2), (1, 8, 3, 2)])
def test_a_packed_row_may_be_flat(shape):
    seen, _ = replayed(Chunk(), ROUTES.reshape(shape), IDS.view(1, 8), **TRUSTED)
    for (_, layer), (routing_map,) in seen.items():
        assert torch.equal(routing_map, as_map(ROUTES.reshape(8, 3, 2)[:, layer - 1]))


def test_rows_of_minus_one_filler_and_padding_are_live_and_padding_is_counted_apart():
    routes = stamped(ROUTES.clone())
    routes[0, 1] = -1
    routes[1, 3] = torch.tensor([0, 1])
    padding = torch.zeros(2, 4, dtype=torch.bool)
    padding[0, 3] = True
    routes[0, 3] = 7  # whatever stands on padding
    chunk = Chunk()
    with watched(chunk) as live:
        chunk(IDS)
    seen, report = replayed(chunk, routes, min_replayed=0.7, padding=padding, filler=[0, 1], **PROVED)
    unrouted = torch.zeros(2, 4, dtype=torch.bool)
    unrouted[0, 1] = unrouted[1, 3] = True
    assert wrong(seen, live=unrouted | padding) == 0
    at = (unrouted | padding).t().reshape(-1)
    assert torch.equal(seen[0, 1][0][at], live[0, 1][0][at])
    assert (report.rows_replayed, report.rows_live, report.rows_padding) == (5, 2, 1)


def test_a_share_is_not_judged_where_nobody_said_what_is_padding():
    routes = ROUTES.clone()
    routes[:, 2:] = -1
    with pytest.raises(ReplayStateError, match="cannot be judged: routes came without padding="):
        replayed(Chunk(), routes, min_replayed=0.9, **TRUSTED)


BROKEN = {
    "outside": (lambda r: r.masked_fill(r == 3, 8), "outside 0..7"),
    "twice": (lambda r: r[..., :1].expand(-1, -1, -1, 2), "an expert twice"),
    "some layers": (lambda r: torch.cat([r[:, :, :2], r[:, :, 2:] * 0 - 1], 2), "some layers without a route"),
    "topk": (lambda r: torch.cat([r, r], 3), "name 4 experts a token, the model's topk is 2"),
    "layers": (lambda r: r[:, :, :2], "routes have 2 layers; the model has 3"),
    "rank": (lambda r: r[0, 0], r"must be \[b, s, layers, topk\]"),
    "float": (lambda r: r.float(), "must be integers"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_routes_that_are_none_are_refused(change, message):
    refused(Chunk(), change(ROUTES), message, **TRUSTED)


def test_columns_are_all_layers_with_filler_in_dense_ones_or_the_moe_layers_or_named():
    chunk = Chunk(moe_layer_freq=[0, 1, 1])
    chunk.layers = chunk.layers[1:]
    routes = ROUTES.clone()
    routes[:, :, 0] = 0
    for given, options in ((routes, {}), (ROUTES[:, :, 1:], {}), (ROUTES.flip(2), {"layer_numbers": [3, 2, 1]})):
        seen, _ = replayed(chunk, given, **TRUSTED, **options)
        assert wrong(seen) == 0
    refused(chunk, ROUTES, r"dense layers \[1\] are not filler", **TRUSTED)


def test_a_stage_judges_rows_by_all_layers_of_the_model():
    chunk, routes = Chunk(), ROUTES.clone()
    chunk.layers = chunk.layers[:1]
    routes[0, 0] = torch.tensor([[0, 1], [2, 3], [4, 5]])  # layer 1 chose what the trainer's filler is
    seen, report = replayed(chunk, routes, filler=[0, 1], **TRUSTED)
    assert (wrong(seen, routes), report.rows_live) == (0, 0)
    routes[0, 0, 0] = -1
    refused(chunk, routes, "some layers without a route", **TRUSTED)


def test_queueing_ahead_is_said_by_a_word():
    chunk = Chunk()
    with watched(chunk) as seen, mrr.replay(chunk):
        mrr.microbatch(chunk, routes=ROUTES, trust_layout=True)
        with pytest.raises(ReplayStateError, match="say ahead=True"):
            mrr.microbatch(chunk, routes=ROUTES.flip(1), trust_layout=True)
        mrr.microbatch(chunk, routes=ROUTES.flip(1), trust_layout=True, ahead=True)
        chunk(IDS, 0)
        chunk(IDS, 1)
    assert wrong({key: maps for key, maps in seen.items() if key[0] == 0}) == 0
    assert wrong({key: maps for key, maps in seen.items() if key[0] == 1}, ROUTES.flip(1)) == 0


def test_tokens_are_compared_with_what_the_forward_gets():
    with pytest.raises(LayoutError, match=r"input_ids\[0, 0\] is \d+, but what was queued there is of"):
        replayed(Chunk(), stamped(), IDS.flip(1), **PROVED)


def test_routes_before_the_model_are_told():
    with pytest.raises(LayoutError, match="MRR403: Tensor is no model: the model comes first"):
        mrr.microbatch(ROUTES, Chunk(), trust_layout=True)


def test_rows_beside_routes_are_not_dropped_in_silence():
    chunk = Chunk()
    with pytest.raises(LayoutError, match="routing_rows and routes= were given"), mrr.replay(chunk) as session:
        session.microbatch(torch.arange(8).view(2, 4), chunk, routes=ROUTES, trust_layout=True)


def test_a_pass_that_shall_not_replay_drops_what_it_is_fed():
    chunk = Chunk()
    with watched(chunk) as live:
        chunk(IDS)
    with watched(chunk) as seen, mrr.replay(chunk, enabled=False) as session:
        mrr.microbatch(chunk, routes=ROUTES, trust_layout=True)
        session.microbatch("what is dropped is not looked at")
        chunk(IDS)
        attached = mrr.attach(chunk)
        chunk(IDS, 1, routing_rows=torch.arange(8).view(2, 4))
        attached.close()
    assert torch.equal(seen[0, 1][0], live[0, 1][0])
    assert torch.equal(seen[1, 1][0], live[0, 1][0])
    assert session.report.forwards == 0
    with pytest.raises(ReplayStateError, match="no session holds this Chunk"):
        mrr.microbatch(chunk, routes=ROUTES, trust_layout=True)


def test_wrappers_of_the_chunk_find_the_session():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args):
            return self.module(*args)

    chunk = Chunk()
    model = Wrapper(Wrapper(chunk))
    for level in (model, model.module, chunk):
        with watched(chunk) as seen, mrr.replay(model):
            mrr.microbatch(level, routes=ROUTES, trust_layout=True)
            model(IDS)
        assert wrong(seen) == 0


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_stage_keeps_its_own_layers_alone_and_nothing_of_the_trainers(num_layers):
    chunk, routes = Chunk(), ROUTES.to(torch.uint8).view(1, 8, 3, 2)
    chunk.layers = chunk.layers[:num_layers]
    session = mrr.replay(chunk)
    mrr.microbatch(chunk, routes=routes, trust_layout=True)
    kept = session._chunks[0].queue._waiting[0].routes.topk_indices.untyped_storage()
    assert kept.nbytes() == 8 * num_layers * 2
    assert kept.data_ptr() != routes.untyped_storage().data_ptr()
    session.close(verify=False)


def test_a_trained_position_needs_a_route_and_a_trace_and_fed_routes_do_not_mix():
    chunk, routes = Chunk(), ROUTES.clone()
    routes[0, 0] = -1
    with (
        mrr.replay(chunk, min_replayed=0) as session,
        pytest.raises(LayoutError, match="a trained position has no route"),
    ):
        session.microbatch(routes=routes, trust_layout=True, trained=torch.ones(2, 4))
    trace = mrr.RoutingTrace(topk_indices=random_routes(8), layer_numbers=[1, 2, 3], num_experts=8)
    with mrr.replay(chunk, trace, min_replayed=0), pytest.raises(LayoutError, match="this session replays a trace"):
        mrr.microbatch(chunk, routes=ROUTES, trust_layout=True)
    with mrr.replay(chunk, min_replayed=0) as session, pytest.raises(LayoutError, match="this session has no trace"):
        session.microbatch(torch.arange(8).view(2, 4))
    with mrr.record(chunk), pytest.raises(LayoutError, match="takes routing_rows"):
        mrr.microbatch(chunk, routes=ROUTES, trust_layout=True)


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
    seen, report = replayed(chunk, routes, padding=padding, **TRUSTED, **options)
    assert wrong(seen, routes, live=unknown) == 0
    assert (report.rows_replayed, report.rows_live) == (int((~unknown).sum()), len(live))


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
    refused(chunk, routes, r"dense layers \[1\] are not filler", filler=FILLER, **TRUSTED)


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
    seen, _ = replayed(chunk, routes[:, :, columns], **TRUSTED)
    assert wrong(seen, routes) == 0


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
    live_mask = all(layer == [0, 1] for layer in layers) or all(each < 0 for layer in layers for each in layer)
    is_legal = all(0 <= each < 8 and layer.count(each) == 1 for layer in layers for each in layer)
    if not (live_mask or is_legal or is_padding):
        refused(Chunk(), routes.to(dtype), "MRR103", padding=padding, filler=FILLER, **TRUSTED)
        return
    live = [(1, 2)] if live_mask and not is_padding else []
    check_replay(Chunk(), routes.to(dtype), live=live, padding=padding, filler=FILLER)


PADDING = torch.tensor([[False, False, False, True], [False, False, True, True]])
MASKS = {
    "inverted": ~PADDING,
    "inverted, where nothing is padded": torch.ones(2, 4, dtype=torch.bool),
    "a loss mask": torch.tensor([[True, True, False, True], [True, False, True, True]]),
    "the other side's": PADDING.flip(1),
    "one position early": PADDING.roll(-1, 1) | PADDING,
    "read as [s, b, 1]": PADDING.t().unsqueeze(2),
}


def padded():
    """[2, 4, 3 and seal, 2] sealed routes with -1 on padding."""
    routes = mrr.stamp(ROUTES, IDS, num_experts=8, dtype=torch.int16)
    routes[PADDING] = -1
    return routes


@pytest.mark.parametrize("mask", MASKS)
def test_no_mask_overrules_a_seal(mask):
    refused(Chunk(), padded(), "MRR203: a position that padding= says is padding", padding=MASKS[mask], **PROVED)


@pytest.mark.parametrize("filler", [None, -1, 0, 7, [0, 1]], ids=str)
def test_a_sound_mask_takes_whatever_stands_on_padding(filler):
    chunk, routes = Chunk(), padded()
    if filler is not None:
        routes[PADDING] = torch.tensor(filler, dtype=torch.int16)
    seen, report = replayed(chunk, routes, padding=PADDING, **PROVED)
    assert wrong(seen, live=PADDING) == 0
    assert (report.rows_replayed, report.rows_padding) == (5, 3)


CHANGED = {
    "layers exchanged": (lambda r: r[:, :, [1, 0, 2, *range(3, r.shape[2])]], {}, "is not as it was stamped"),
    "layers exchanged, by their numbers": (lambda r: r.flip(2), {"layer_numbers": [3, 2, 1]}, "MRR203"),
    "a layer cut": (lambda r: r[:, :, 1:], {"layer_numbers": [2, 3]}, "Feed all layers"),
    "an id changed": (lambda r: torch.where(r == 3, 4, r), {}, "is not as it was stamped"),
    "never stamped": (lambda r: torch.cat([ROUTES, ROUTES], 2), {}, "bears no seal"),
    "stamped for another model": (
        lambda r: mrr.stamp(ROUTES, IDS, num_experts=16),
        {},
        "of 16 experts, this one has 8",
    ),
    "rows one too late": (lambda r: r.roll(1, 1), {}, "is the row of token"),
    "zeros where a row was": (lambda r: r.index_fill(1, ZERO, 0), {}, "bears no seal"),
}


@pytest.mark.parametrize("missing", ["raise", "live"])
@pytest.mark.parametrize("name", CHANGED)
def test_a_row_that_is_not_as_it_was_stamped_raises_whatever_may_be_missing(name, missing):
    change, options, message = CHANGED[name]
    chunk = Chunk()
    if name.startswith("a layer cut"):
        chunk.layers = chunk.layers[1:]
    refused(chunk, change(stamped()), message, missing=missing, **PROVED, **options)


@pytest.mark.parametrize("is_stamped", [True, False])
def test_a_row_that_lacks_a_layer_raises_or_is_live_by_word(is_stamped):
    routes = ROUTES.clone()
    routes[1, 2, 1] = 0
    chunk, routes = Chunk(), stamped(routes) if is_stamped else routes
    given = PROVED if is_stamped else {"token_ids": IDS, **TRUSTED}
    refused(chunk, routes, r"MRR103: .*some layers without a route", **given)
    live = torch.zeros(2, 4, dtype=torch.bool)
    live[1, 2] = True
    seen, report = replayed(chunk, routes, **given, missing="live")
    assert (wrong(seen, live=live), report.rows_live) == (0, 1)
    refused(chunk, routes, "a trained position has no route", **given, missing="live", trained=live)
    refused(chunk, routes, "MRR411: missing='skip' is neither", **given, missing="skip")


def test_layer_numbers_of_0_are_left_out_unread():
    chunk = Chunk()
    chunk.layers = chunk.layers[1:]
    routes = torch.cat([ROUTES[:, :, :1] * 0 + 99, ROUTES[:, :, 1:], ROUTES[:, :, :1] * 0 + 99], 2)
    seen, _ = replayed(chunk, routes, layer_numbers=[0, 2, 3, 0], **TRUSTED)
    assert wrong(seen) == 0
    for numbers in ([2, 2, 3, 0], [2, 3], [-1, 2, 3, 0]):
        refused(chunk, routes, "does not name each once", layer_numbers=numbers, **TRUSTED)
