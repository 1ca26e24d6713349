"""R2 on a chunk of real routers: rows for tokens without routes, and the recording back in the tokens' container."""

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, ReplayStateError, TraceError
from megatron_router_replay.trainers import number_batch, recorded_routes
from tests.unit.mcore.tiny_chunk import Chunk, watched
from tests.unit.trainers.batches import LENGTHS, ROWS, attention_mask, nested, padded


def token_ids(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(32, (length,), generator=generator) for length in LENGTHS]


def recorded_by(chunk, samples, *, only=None, rows=None):
    """Record each sample in a forward of its own; return (session, routing maps [14, 8] of each layer)."""
    mrr.attach(chunk)
    numbered = number_batch(samples) if rows is None else rows
    with watched(chunk) as seen, mrr.record(chunk) as recording:
        for i, (part, of_part) in enumerate(zip(samples, numbered)):
            if only is None or i in only:
                chunk(input_ids=part.unsqueeze(0), routing_rows=of_part.unsqueeze(0))
    maps = {layer: torch.cat(seen[0, layer]) for layer in (1, 2, 3)}
    return recording, maps


def in_container(container, samples):
    return {
        "jagged": (nested(samples), {}),
        "left": (padded(samples, side="left"), {"attention_mask": attention_mask(side="left")}),
        "right": (padded(samples), {"lengths": LENGTHS}),
        "list": (samples, {}),
    }[container]


@pytest.mark.parametrize("container", ["jagged", "left", "right", "list"])
def test_a_recording_comes_back_in_the_container_of_the_tokens(container):
    samples = token_ids()
    chunk = Chunk()
    recording, maps = recorded_by(chunk, samples)
    like, where = in_container(container, samples)
    routes = recorded_routes(recording, like=like, **where)
    is_padded = container in ("left", "right")
    rows = routes[attention_mask(side=container).bool()] if is_padded else torch.cat(list(routes))
    assert rows.dtype is torch.uint8
    for layer, routing_map in maps.items():
        assert torch.equal(
            torch.zeros(14, 8, dtype=torch.bool).scatter(1, rows[:, layer - 1].long(), True), routing_map
        )
    if container == "list":
        assert [part.shape for part in routes] == [(length, 3, 2) for length in LENGTHS]
    elif container == "jagged":
        assert routes.shape[0] == 3
        assert (routes.offsets() == like.offsets()).all()
    else:
        assert routes.shape == (3, 9, 3, 2)


def test_rows_are_numbered_sample_by_sample():
    assert [part.tolist() for part in number_batch(token_ids())] == ROWS
    assert number_batch(torch.zeros(2, 3)).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert number_batch(torch.zeros(2, 3), torch.tensor([[0, 1, 1], [1, 0, 1]])).tolist() == [[-1, 0, 1], [2, -1, 3]]


def test_a_token_that_was_recorded_nowhere_raises():
    samples = token_ids()
    recording, _ = recorded_by(Chunk(), samples, only=(0, 2))
    with pytest.raises(
        ReplayStateError, match="1 of 14 tokens were recorded nowhere, the first is token 0 of sample 1"
    ):
        recorded_routes(recording, like=samples)


def test_other_tokens_than_were_recorded_raise():
    samples = token_ids()
    recording, _ = recorded_by(Chunk(), samples)
    with pytest.raises(LayoutError, match="positions differ"):
        recorded_routes(recording, like=[samples[0], samples[1], samples[2].flip(0)])
    with pytest.raises(TraceError, match="row 13 was recorded"):
        recorded_routes(recording, like=samples[:2])


def test_a_batch_that_was_numbered_before_it_was_split_names_its_rows():
    samples = token_ids()
    rows = [part + 100 for part in number_batch(samples)]
    recording, maps = recorded_by(Chunk(), samples, rows=rows)
    routes = recorded_routes(recording, like=samples, rows=rows)
    chosen = torch.zeros(14, 8, dtype=torch.bool).scatter(1, torch.cat(routes)[:, 0].long(), True)
    assert torch.equal(chosen, maps[1])
    with pytest.raises(LayoutError, match="row -1"):
        recorded_routes(recording, like=samples, rows=[part - 101 for part in rows])


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (LENGTHS[:2], r"do not fit tokens of \[3, 9\]"),
        ([*LENGTHS[:2], 10], r"do not fit tokens of \[3, 9\]"),
        ([*LENGTHS[:2], -1], "hold a negative one"),
    ],
    ids=["one sample less", "longer than the batch", "negative"],
)
def test_lengths_that_do_not_fit_the_batch_are_refused(lengths, message):
    with pytest.raises(LayoutError, match=rf"MRR801: lengths \[.*\] {message}"):
        number_batch(padded(token_ids()), lengths=lengths)


@pytest.mark.parametrize("layout", ["strided", "jagged with gaps"])
def test_nested_tokens_are_numbered_in_every_layout(layout):
    like = nested(token_ids(), torch.strided)
    if layout == "jagged with gaps":
        like = torch.nested.narrow(
            padded(token_ids()), 1, torch.zeros(3, dtype=int), torch.tensor(LENGTHS), torch.jagged
        )
    assert [part.tolist() for part in number_batch(like).unbind()] == ROWS
