"""What a trainer may queue for a session, and what the forward then gets: it works or raises, and never goes unnoticed."""

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

import megatron_router_replay as mrr
from megatron_router_replay.diagnostics.page import save_page
from megatron_router_replay.errors import LayoutError, ReplayStateError, TraceError
from megatron_router_replay.mcore.batches import chunk as chunk_module
from megatron_router_replay.mcore.batches.upload import KeptLayer, LayerRoutes
from tests.unit.mcore.tiny_chunk import (
    HIDDEN,
    ROWS,
    VOCAB,
    Chunk,
    disturbed_backward,
    forward,
    random_routes,
    random_trace,
    reentrant,
    tokens,
    watched,
    wrong_replays,
)

QUEUED = {"record": mrr.record, "replay": lambda chunk: mrr.replay(chunk, random_trace(8))}
IDS = tokens()
OTHERS = (IDS + 1) % VOCAB


def replayed(chunk, the_trace, rows=ROWS, ids=IDS, **values):
    """One replayed forward: what was routed, and the report."""
    with watched(chunk) as seen, mrr.replay(chunk, the_trace) as session:
        session.microbatch(rows, **values)
        chunk(ids)
    return seen, session.report


def refused(start, rows, message, error=LayoutError, **values):
    chunk = Chunk()
    session = start(chunk)
    with pytest.raises(error, match=message):
        session.microbatch(rows, **values)
    mrr.close_sessions(chunk)


# ---- rows by hand


def replay_without(row):
    """Start a replay of a trace in which another rank has this row: neither route nor token is known."""
    others = torch.arange(8) != row
    ids = torch.where(others, IDS.reshape(-1), -1)
    ids[4] = 0  # token 0 is a token as any other, with or without a route
    trace = random_trace(8, replay_mask=others & (torch.arange(8) != 4), token_ids=ids)
    return lambda chunk: mrr.replay(chunk, trace)


def replay_of(num_rows):
    return lambda chunk: mrr.replay(chunk, random_trace(num_rows))


NESTED = torch.nested.nested_tensor([torch.arange(4), torch.arange(4)], layout=torch.jagged)
RECORD, REPLAY = QUEUED["record"], QUEUED["replay"]
FIRST, LAST = ROWS == 0, ROWS == 7
OUTSIDE = r"rows reach outside the trace's rows 0\.\.\d+; padding is -1"
# How to start, rows, what stands beside them, message.
REFUSED = {
    "three axes": (RECORD, ROWS.view(1, 2, 4), {}, "rows must have the shape of input_ids"),
    "no axis": (RECORD, ROWS[0, 0], {}, "rows must have the shape of input_ids"),
    "shorter padding": (REPLAY, ROWS, {"padding": ROWS[0] < 0}, r"rows \[2, 4\] and padding \[.*\] differ in shape"),
    "turned tokens": (RECORD, ROWS, {"token_ids": IDS.t()}, r"rows \[2, 4\] and token_ids \[.*\] differ in shape"),
    "nested": (RECORD, NESTED, {}, "must be a plain tensor"),
    "sparse": (RECORD, ROWS.to_sparse(), {}, "must be a plain tensor"),
    "meta": (RECORD, ROWS.to("meta"), {}, "must be a plain tensor"),
    "text": (RECORD, "rows", {}, "must be integers"),
    "floats": (RECORD, ROWS.float(), {}, "must be integers"),
    "tokens of floats": (RECORD, ROWS, {"token_ids": IDS + 0.5}, "token_ids must be integers"),
    "ragged tokens": (RECORD, ROWS, {"token_ids": [[1, 2], [3]]}, "token_ids must be"),
    "padding of text": (RECORD, ROWS, {"padding": "abc"}, "padding must be"),
    # Unsigned integers hold -1 as their highest number.
    "uint8": (
        replay_of(256),
        torch.where(LAST, -1, ROWS).to(torch.uint8),
        {},
        "have 255, which a -1 becomes there",
    ),
    "uint16": (
        replay_of(65536),
        torch.where(LAST, -1, ROWS).to(torch.uint16),
        {},
        "have 65535, which a -1 becomes there",
    ),
    "below -1": (REPLAY, torch.where(LAST, -2, ROWS), {}, OUTSIDE),
    "behind the trace": (REPLAY, torch.where(LAST, 8, ROWS), {}, OUTSIDE),
    "below -1 in a recording": (RECORD, torch.where(LAST, -2, ROWS), {}, OUTSIDE),
    "2 ** 31": (RECORD, torch.where(LAST, 1 << 31, ROWS), {}, OUTSIDE),
    "first row of another rank": (replay_without(0), ROWS, {}, r"without any entry in the trace \(row 0, 1 in all\)"),
    "last row of another rank": (replay_without(7), ROWS, {}, r"without any entry in the trace \(row 7, 1 in all\)"),
    "padding has a row": (REPLAY, ROWS, {"padding": FIRST}, "a position with padding=True has a routing row"),
    "inverted padding": (RECORD, torch.where(FIRST, -1, ROWS), {"padding": ~FIRST}, "mask is inverted"),
    "tokens of no trace": (REPLAY, ROWS, {"token_ids": IDS}, "given for comparison, but the trace has none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_cannot_be_right_are_refused(name):
    start, rows, values, message = REFUSED[name]
    refused(start, rows, message, **values)


@pytest.mark.parametrize(
    "rows", [ROWS, ROWS.numpy().astype(np.uint16), ROWS.to(torch.uint8), torch.where(LAST, -1, ROWS)]
)
def test_rows_of_any_integers_replay_with_any_kind_of_mask(rows):
    trace, padding = random_trace(8), np.zeros((2, 4), np.uint16)
    seen, report = replayed(Chunk(), trace, rows, padding=padding)
    signed = torch.as_tensor(np.asarray(rows).astype(np.int64))
    assert wrong_replays(seen, trace, signed) == 0
    assert (report.rows_replayed, report.rows_padding) == (int((signed >= 0).sum()), 0)


@pytest.mark.parametrize("direct", [False, True], ids=["called", "direct forward"])
@pytest.mark.parametrize(
    "rows",
    [ROWS.reshape(-1), ROWS.t(), ROWS.reshape(1, 8), ROWS[:, :3]],
    ids=["flat", "[s, b]", "[1, b*s]", "too short"],
)
def test_rows_of_another_shape_than_the_batch_are_refused(rows, direct):
    chunk = Chunk()
    with pytest.raises((LayoutError, ReplayStateError), match="shape"), mrr.replay(chunk, random_trace(8)) as session:
        session.microbatch(rows)
        (chunk.forward if direct else chunk)(IDS)


def test_a_row_of_minus_one_is_routed_live_and_so_is_padding_which_is_counted_apart():
    chunk, trace, rows = Chunk(), random_trace(8), ROWS.clone()
    rows[0, 1] = rows[1, 3] = -1
    with watched(chunk) as live:
        chunk(IDS)
    seen, report = replayed(chunk, trace, rows)
    assert wrong_replays(seen, trace, rows) == 0
    unrouted = rows.t().reshape(-1) < 0
    assert torch.equal(seen[0, 1][0][unrouted], live[0, 1][0][unrouted])  # layer 1: behind it hidden states differ
    assert (report.rows_replayed, report.rows_live, report.rows_padding) == (6, 2, 0)
    assert report.metrics()["router_replay/replayed_share"] == 0.75
    rows = torch.where(torch.arange(4) == 3, -1, ROWS)
    seen, report = replayed(chunk, trace, rows, padding=(rows < 0).numpy())
    assert wrong_replays(seen, trace, rows) == 0
    assert torch.equal(seen[0, 1][0][-2:], live[0, 1][0][-2:])
    numbers = report.metrics()
    assert (numbers["router_replay/padding_share"], numbers["router_replay/replayed_share"]) == (0.25, 1.0)


TWICE = torch.tensor([[0, 1, 2, 3], [0, 1, 2, -1]])
"""A sample that a batch has twice, or rows that restart in each sample."""


class OfEmbeddings(Chunk):
    """Its forward gets no ids."""

    def forward(self, decoder_input):
        for layer in self.layers:
            decoder_input = layer(decoder_input)
        return decoder_input


def test_rows_that_are_named_twice_are_counted_and_warned_of_if_their_tokens_are_compared(caplog):
    trace, ids = random_trace(8, token_ids=IDS.reshape(-1)), IDS[:1].repeat(2, 1)
    for chunk, inputs, values in (
        (Chunk(), ids, {}),
        (OfEmbeddings(), torch.ones(4, 2, HIDDEN), {"token_ids": ids}),
    ):
        with caplog.at_level("WARNING"):
            _, report = replayed(chunk, trace, TWICE, inputs, **values)
        assert report.rows_repeated == 3
        assert "3 rows were named twice" in caplog.text
        caplog.clear()
    with pytest.raises(LayoutError, match=r"MRR203: .*input_ids\[1, 0\]"):
        replayed(Chunk(), trace, TWICE, IDS)


def test_rows_that_are_named_twice_raise_if_no_token_can_be_compared():
    ids = IDS.reshape(-1)
    message = "MRR202: rows by hand name 3 rows of the trace again .* restart in each sample.* no token ids to compare"
    for tokens_of_trace in (None, torch.where(torch.arange(8) == 2, -1, ids)):
        trace = random_trace(8, token_ids=tokens_of_trace)
        refused(lambda chunk, trace=trace: mrr.replay(chunk, trace), TWICE, message)
    # A pipeline stage without ids relies on the first one.
    later = OfHiddenStates()
    later.pre_process = False
    _, report = replayed(later, random_trace(8, token_ids=ids), TWICE, None)
    assert report.rows_repeated == 3
    chunk, hidden = OfEmbeddings(), torch.ones(4, 2, HIDDEN)
    with mrr.replay(chunk, random_trace(8, token_ids=ids), min_agreement=0) as session:
        session.microbatch(TWICE)
        with pytest.raises(
            LayoutError, match=r"MRR202: .*micro-batch 0 of chunk 0 embeds no input_ids.*token_ids=\.\.\."
        ):
            chunk(hidden)
        session.microbatch(ROWS)  # of the forward that raised, nothing is left
        chunk(hidden)
    assert session.report.rows_repeated == 0


# ---- tokens: of the rows by hand, of the trace, of the forward


@pytest.mark.parametrize("position", range(8))
def test_a_single_token_that_differs_is_found_and_an_unknown_one_is_not_compared(position):
    ids = torch.where(ROWS == 4, 0, IDS)  # token 0 is a token as any other
    changed = torch.where(ROWS == position, (ids + 1) % VOCAB, ids).reshape(2, 4)
    ids = torch.where(ROWS == 3, -1, ids).reshape(-1)  # of a recording that did not see it
    chunk, rows = Chunk(), torch.where(ROWS == 6, -1, ROWS)
    session = mrr.replay(chunk, random_trace(8, token_ids=ids))
    session.microbatch(rows)
    if position in (3, 6):
        chunk(changed)
        session.close()
        return
    with pytest.raises(
        LayoutError, match=rf"micro-batch 0 of chunk 0: input_ids\[{position // 4}, {position % 4}\] is"
    ):
        chunk(input_ids=changed)
    mrr.close_sessions(chunk)


def test_tokens_that_the_caller_gives_are_compared_with_the_trace_and_the_forward():
    trace = random_trace(8, token_ids=IDS.reshape(-1))
    at_once = r"input_ids\[0, 0\] is .* but its routing row 0 was recorded for token"
    refused(lambda chunk: mrr.replay(chunk, trace), ROWS, at_once, token_ids=OTHERS)
    replayed(Chunk(), trace, token_ids=IDS)
    chunk = Chunk()
    with (
        pytest.raises(LayoutError, match=r"\[0, 0\] is \d+, but the row given there is of"),
        mrr.record(chunk) as recording,
    ):
        recording.microbatch(ROWS, token_ids=IDS)
        chunk(OTHERS)


class Flat(Chunk):
    """Takes [total] tokens of one packed sequence; its routers get [total, hidden]."""

    def forward(self, input_ids, number=0):
        hidden = self.embedding[input_ids] * (torch.arange(HIDDEN) < HIDDEN - 1)
        for layer in self.layers:
            layer.router(hidden)
        return hidden


def test_flat_input_ids_are_compared_position_by_position():
    ids, rows = IDS.reshape(-1), torch.arange(8)
    trace = random_trace(8, token_ids=ids)
    seen, _ = replayed(Flat(), trace, rows, ids.to(torch.int32))
    assert wrong_replays(seen, trace, rows.view(1, 8)) == 0
    with pytest.raises(LayoutError, match=r"input_ids\[0, 0\] is \d+, but its routing row 0 was recorded for"):
        replayed(Flat(), trace, rows, OTHERS.reshape(-1))
    with pytest.raises(LayoutError, match=r"gets input_ids \[1, 7\], its routes are for \[1, 8\]"):
        replayed(Flat(), trace, rows, ids[:7])


def test_a_router_that_gets_tokens_of_several_sequences_in_one_row_raises():
    """Whether they lie sequence by sequence or position by position is not to be seen; Megatron-Core routes both."""
    chunk, trace = Chunk(), random_trace(8)
    chunk.around = lambda layer, hidden: (layer.router(hidden.transpose(0, 1).flatten(0, 1)), hidden)[1]
    session = mrr.replay(chunk, trace)
    session.microbatch(ROWS)
    with pytest.raises(ReplayStateError, match=r"MRR201: .*routes tokens of \[s, b\] = \[8\] .* are for \[4, 2\]"):
        chunk(IDS)
    mrr.close_sessions(chunk)


class OfHiddenStates(Chunk):
    """A later pipeline stage: its forward gets what is no tokens, or tokens as they were before packing."""

    def forward(self, *args, **kwargs):
        hidden = torch.zeros(4, 2, HIDDEN)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


@pytest.mark.parametrize(
    "argument",
    [torch.zeros(3, 5), torch.nested.nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged), None],
    ids=["floats", "nested", "None"],
)
def test_a_stage_without_tokens_compares_none_and_may_be_empty(argument):
    chunk, trace = OfHiddenStates(), random_trace(8, token_ids=IDS.reshape(-1))
    seen, _ = replayed(chunk, trace, ids=argument)
    assert (len(seen[0, 2]), wrong_replays(seen, trace, ROWS)) == (1, 0)
    chunk = Chunk()
    chunk.pre_process = False  # embeds nothing, so it may get tokens of another kind
    seen, _ = replayed(chunk, random_trace(8, token_ids=torch.arange(8)))
    assert wrong_replays(seen, trace, ROWS) == 0


@pytest.mark.parametrize("rows", [ROWS.view(1, 8), ROWS[:, :3]])
def test_a_stage_without_tokens_refuses_rows_of_another_shape_in_its_first_router(rows):
    """Of as many rows in another order, the shape alone tells."""
    chunk = OfHiddenStates()
    session = mrr.replay(chunk, random_trace(8))
    session.microbatch(rows)
    with pytest.raises(
        ReplayStateError, match=r"MRR201: .*the router routes tokens of \[s, b\] = \[4, 2\] on this rank"
    ):
        chunk()
    mrr.close_sessions(chunk)


# ---- what changes between queue and forward changes nothing


@pytest.mark.parametrize("batch", [(2, 4), (1, 8)], ids=["b = 2", "b = 1"])
@pytest.mark.parametrize("given", [True, False])
def test_a_recording_copies_rows_by_hand_for_the_trainer_reuses_them(batch, given):
    chunk = Chunk()
    rows, ids = torch.arange(8).view(batch), tokens(*batch)
    rows_buffer, ids_buffer, padding = rows.clone(), ids.clone(), torch.zeros(batch)
    with watched(chunk) as seen, mrr.record(chunk) as recording:
        recording.microbatch(rows_buffer, token_ids=ids_buffer if given else None, padding=padding)
        padding.fill_(1)
        chunk(ids_buffer)
        rows_buffer.fill_(3)
        ids_buffer.zero_()
    recorded = recording.trace()
    assert recorded.token_ids.tolist() == ids.reshape(-1).tolist()
    assert (wrong_replays(seen, recorded, rows), recording.report.rows_padding) == (0, 0)


@pytest.mark.parametrize("when", ["before the session", "between two micro-batches"])
def test_a_trace_that_is_changed_in_place_is_refused_before_a_router_takes_it(when):
    chunk, trace = Chunk(), random_trace(16).to("cpu")
    with watched(chunk) as seen, pytest.raises(TraceError, match="topk_indices of the trace was changed in place"):
        if when == "before the session":
            trace.topk_indices[:, :, 1] = trace.topk_indices[:, :, 0]
        with mrr.replay(chunk, trace) as session:
            session.microbatch(ROWS)
            chunk(IDS)
            trace.topk_indices[:, :, 1] = trace.topk_indices[:, :, 0]  # one expert a token
            session.microbatch(ROWS + 8)
    assert len(seen) == (0 if when == "before the session" else 3)


# ---- how many micro-batches, and of which model


def test_what_is_no_trace_or_no_share_is_refused_and_a_path_is_read(tmp_path):
    chunk, trace = Chunk(), random_trace(8)
    with pytest.raises(TraceError, match="cannot replay a dict"):
        mrr.replay(chunk, {})
    for name in ("min_replayed", "min_agreement"):
        for least in (-0.1, 1.1, "0.9"):
            with pytest.raises(TraceError, match=rf"{name}=.* must be a share"):
                mrr.replay(chunk, trace, **{name: least})
    mrr.save_trace(trace, tmp_path / "routes.safetensors")
    seen, _ = replayed(chunk, tmp_path / "routes.safetensors")
    assert wrong_replays(seen, trace, ROWS) == 0


def test_chunks_that_share_a_router_are_refused_where_rows_are_given():
    one, other = Chunk(), Chunk(seed=1)
    other.layers[2].router = one.layers[2].router
    for start in QUEUED.values():
        with pytest.raises(LayoutError, match="chunk 0 and chunk 1 share a router, layer 3"):
            start([one, other])
    mrr.freeze_recompute([one, other]).close()


def test_an_empty_micro_batch_between_others():
    chunk, trace = Chunk(), random_trace(16)
    chunk.around = reentrant
    nothing = torch.empty(1, 0, dtype=torch.int64)
    with mrr.replay(chunk, trace, verify=True) as session:
        first = forward(chunk, session, 0)
        session.microbatch(nothing)
        assert chunk(nothing).shape == (0, 1, 32)
        with watched(chunk) as seen:
            disturbed_backward(chunk, first, forward(chunk, session, 1))
        assert wrong_replays(seen, trace) == 0
    assert session.report.microbatches == 3


def test_an_option_that_is_misspelt_names_the_similar_one():
    message = r"^microbatch\(\) got an unexpected keyword argument 'rowz'\. Did you mean 'rows'\?$"
    refused(mrr.record, ROWS, message, TypeError, rowz=ROWS)
    for call, option, similar in (
        (mrr.record, "padding_token_idz", "padding_token_ids"),
        (mrr.freeze_recompute, "indexer", "indexers"),
        (mrr.replay, "padding_token_id", "padding_token_ids"),
    ):
        message = rf"^{call.__name__}\(\) got an unexpected keyword argument '{option}'\. Did you mean '{similar}'\?$"
        with pytest.raises(TypeError, match=message):
            call(Chunk(), **{option: True})
    for call, option, similar in (
        (mrr.RoutingTrace.from_samples, "layer_number", "layer_numbers"),
        (mrr.load_trace, "sample", "samples"),
        (save_page, "paths", "path"),
    ):
        with pytest.raises(TypeError, match=rf"argument '{option}'\. Did you mean '{similar}'\?$"):
            call(**{option: True})
    with pytest.raises(TypeError, match=r"^replay\(\) got an unexpected keyword argument 'stamped'$"):
        mrr.replay(Chunk(), random_trace(8), stamped=True)


def test_rows_that_are_given_in_a_backward_raise_where_no_forward_follows():
    chunk = Chunk()
    trace = random_trace(8)
    with mrr.replay(chunk, trace, min_agreement=0) as session:
        output = forward(chunk, session, 0)
        output.register_hook(lambda gradient: session.microbatch(ROWS))
        with pytest.raises(ReplayStateError, match=r"MRR407: rows were given in a backward.*right before each forward"):
            output.sum().backward()


def test_rows_that_are_given_in_a_pause_or_in_a_recompute_are_of_no_forward():
    chunk, trace = Chunk(), random_trace(8)

    def step(scale):  # a checkpoint of the trainer's own around its forward step
        session.microbatch(ROWS)
        return chunk(IDS) * scale

    with watched(chunk) as seen, mrr.replay(chunk, trace, min_agreement=0) as session:
        with session.paused():
            session.microbatch(ROWS)
            chunk(IDS, 1)
        checkpoint(step, torch.ones((), requires_grad=True), use_reentrant=False).sum().backward()
    assert session.report.microbatches == 1
    assert (wrong_replays({key: maps for key, maps in seen.items() if key[0] == 0}, trace), len(seen[0, 1])) == (0, 2)


@pytest.mark.parametrize(("ids", "message"), [(IDS[:, :3], "MRR201"), (OTHERS, "MRR203")])
def test_a_forward_of_other_tokens_leaves_no_micro_batch(ids, message):
    chunk, trace = Chunk(), random_trace(8, token_ids=IDS.reshape(-1))
    with watched(chunk) as seen, mrr.replay(chunk, trace, min_agreement=0) as session:
        session.microbatch(ROWS)
        with pytest.raises(LayoutError, match=message):
            chunk(ids, 1)
        session.microbatch(ROWS)
        chunk(IDS)
    assert (session.report.microbatches, len(seen), wrong_replays(seen, trace)) == (1, 3, 0)


class Planned(Chunk):
    """A model whose layers run after `build_schedule_plan` has returned."""

    def build_schedule_plan(self, input_ids):
        return lambda: Chunk.forward(self, input_ids)


def test_a_plan_whose_layers_never_ran_gives_its_rows_to_no_other_plan():
    trace = random_trace(8, token_ids=IDS.reshape(-1), sequence_lengths=(4, 4))
    chunk = Planned()
    with mrr.replay(chunk, trace, min_agreement=0) as session:
        chunk.build_schedule_plan(IDS)()
        assert session.report.microbatches == 1
    session = mrr.replay(chunk, trace)
    chunk.build_schedule_plan(IDS)
    with pytest.raises(
        ReplayStateError, match=r"MRR407: .*rows were given for micro-batch 0, and no forward has used them"
    ):
        chunk.build_schedule_plan(IDS.flip(0))
    mrr.close_sessions(chunk)


def test_a_routed_row_needs_no_token_id_where_others_have_no_route():
    ids = torch.where((FIRST | (ROWS == 1)).reshape(-1), -1, IDS.reshape(-1))  # rows 0 and 1 are of unknown tokens
    trace = random_trace(8, replay_mask=torch.arange(8) != 4, token_ids=ids)
    rows = torch.where(LAST, -1, ROWS)
    seen, report = replayed(Chunk(), trace, rows)
    assert (wrong_replays(seen, trace, rows), report.rows_replayed, report.rows_live) == (0, 6, 2)


def test_verify_is_yes_or_no():
    with pytest.raises(
        TraceError, match=r"MRR101: verify='all' must be True or False: True compares every routing map"
    ):
        mrr.replay(Chunk(), random_trace(8), verify="all")


# ---- one layer after another is widened


def test_each_layer_is_widened_with_its_block_in_the_forward_and_the_recompute():
    compact = random_routes(6, 40).to(torch.uint8)  # two whole blocks of 16 layers, and half of one
    routes = LayerRoutes(compact)
    kept = [KeptLayer(routes, layer) for layer in range(40)]
    assert {(each.shape, each.dtype) for each in kept} == {((6, 2), torch.uint8)}
    for layer in (17, 3, 39, *(other for other in range(40) if other not in (17, 3, 39))):
        wide = routes.layer(layer)
        assert (wide.dtype, torch.equal(wide, compact[:, layer].long())) == (torch.int64, True)
    assert routes._blocks == {}, "every layer was asked for, and no widened block is kept"
    for layer in reversed(range(40)):
        assert torch.equal(kept[layer].to(torch.int64), compact[:, layer].long())
        assert len(routes._blocks) == (layer not in (0, 16, 32))


def test_stages_are_compared_by_the_order_of_their_micro_batches(monkeypatch):
    monkeypatch.setattr(chunk_module.Chunk, "stage", property(lambda self: (0, 0)))

    def digest(*numbers):
        chunk = Chunk()
        with mrr.replay(chunk, random_trace(16)) as session:
            for number in numbers:
                session.microbatch(ROWS + 8 * number)
                chunk(tokens(), number)
            return session._microbatches.chunks[0].digest

    assert digest(0, 1) == digest(0, 1)
    assert digest(0, 1) != digest(1, 0)
    assert digest(0, 1) != digest(1, 1)
    assert digest(0, 0) != digest(1, 1)
