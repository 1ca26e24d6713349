"""A multi-token-prediction layer: replayed where asked for, else frozen; in the chunk's forward or behind it."""

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import ReplayStateError, TraceError
from tests.unit.mcore.tiny_chunk import (
    HIDDEN,
    ROWS,
    Chunk,
    as_map,
    bare,
    disturbed_backward,
    flips,
    live_maps,
    non_reentrant,
    num_recomputed,
    plain,
    random_trace,
    reentrant,
    tokens,
    watched,
)

pytestmark = pytest.mark.version

OF_MTP = 100  # the watcher tells the two routers of layer number 1 apart by the number of the forward


class WithMtp(Chunk):
    """Decoder layers 1 and 2 of 2, and an MTP layer that takes what they return."""

    def __init__(self):
        from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

        super().__init__()
        self.config.num_layers, self.config.mtp_num_layers = 2, 1
        self.mtp = bare(MultiTokenPredictionLayer, layer_number=1, mtp_model_layer=self.layers[2])
        self.mtp.mtp_model_layer.router.layer_number = 1  # as later versions of Megatron-Core number it
        self.layers = self.layers[:2]
        self.behind = False  # whoever calls the chunk calls the MTP layer too

    def forward(self, input_ids, number=0):
        logits = super().forward(input_ids, number)
        return logits if self.behind else logits.sum() + self.predict(logits, number).sum()

    def predict(self, logits, number=0):
        hidden = logits[..., :HIDDEN].clone()
        hidden[..., -1] = OF_MTP + number
        return self.around(self.mtp.mtp_model_layer, hidden)

    @property
    def routers(self):
        return [layer.router for layer in (*self.layers, self.mtp.mtp_model_layer)]


def is_replayed(seen, trace, number=0):
    """For layers 1, 2 and the MTP layer: whether the forward's experts are the trace's (of whatever layers it has)."""
    at = (ROWS + 8 * number).t().reshape(-1)
    keys = {1: (number, 1), 2: (number, 2), 3: (OF_MTP + number, 1)}
    return [torch.equal(seen[keys[layer]][0], as_map(trace.layer(layer)[at])) for layer in trace.layer_numbers]


@pytest.mark.parametrize("around", [plain, reentrant, non_reentrant])
def test_an_mtp_layer_stays_live_and_its_recompute_is_frozen(around):
    chunk, trace = WithMtp(), random_trace(8, 2)
    chunk.around = around
    live = live_maps(chunk)[1]  # of decoder layer 1 and of the MTP layer in turns
    with watched(chunk) as seen, mrr.replay(chunk, trace, verify=True) as session:
        session.microbatch(ROWS)
        disturbed_backward(chunk, chunk(tokens()))
    assert is_replayed(seen, trace) == [True, True]
    assert torch.equal(seen[OF_MTP, 1][0], live[1])
    assert (num_recomputed(seen), flips(seen)) == (0 if around is plain else 3, 0)
    assert (session.report.routers, session.report.forwards, session.report.microbatches) == (3, 3, 1)


def test_with_mtp_it_is_replayed_as_the_layer_behind_the_last():
    chunk, trace = WithMtp(), random_trace(8)
    chunk.around = reentrant
    with watched(chunk) as seen, mrr.replay(chunk, trace, mtp=True) as session:
        session.microbatch(ROWS)
        disturbed_backward(chunk, chunk(tokens()))
    assert is_replayed(seen, trace) == [True, True, True]
    assert (num_recomputed(seen), flips(seen)) == (3, 0)
    with pytest.raises(TraceError, match=r"MTP layer 3 .*has no routes"):
        mrr.replay(chunk, random_trace(8, 2), mtp=True)


@pytest.mark.parametrize(("mtp", "layers"), [(False, (1, 2)), (True, (1, 2, 3))])
def test_it_is_recorded_only_if_asked_for(mtp, layers):
    chunk = WithMtp()
    with watched(chunk) as seen, mrr.record(chunk, mtp=mtp) as recording:
        recording.microbatch(ROWS)
        chunk(tokens())
    trace = recording.trace()
    assert trace.layer_numbers == layers
    assert is_replayed(seen, trace) == [True] * len(layers)


def test_an_mtp_layer_behind_the_chunk_routes_what_the_chunk_forwarded():
    chunk, trace = WithMtp(), random_trace(24)
    chunk.behind = True
    with watched(chunk) as seen, mrr.replay(chunk, trace, mtp=True) as session:
        for number in range(3):
            session.microbatch(ROWS + 8 * number)
        for number in range(3):
            chunk.predict(chunk(tokens(), number), number)
            assert session.report.microbatches == number + 1
    assert [is_replayed(seen, trace, number) for number in range(3)] == [[True] * 3] * 3


def begin_anew(chunk, session):
    chunk(tokens())
    session.microbatch(ROWS + 8)
    chunk(tokens())


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (begin_anew, "micro-batch 0: a new forward began, but no forward of its MTP layer 3"),
        (lambda chunk, session: chunk(tokens()), "micro-batch 0: its MTP layer 3 was not forwarded"),
        (
            lambda chunk, session: chunk.predict(chunk.predict(chunk(tokens())).repeat(1, 1, 4)),
            "micro-batch 1, MTP layer 3: a forward without routes",
        ),
    ],
)
def test_an_mtp_layer_behind_the_chunk_that_is_left_out_or_runs_twice_raises(steps, message):
    chunk = WithMtp()
    chunk.behind = True
    with pytest.raises(ReplayStateError, match=message), mrr.replay(chunk, random_trace(16), mtp=True) as session:
        session.microbatch(ROWS)
        steps(chunk, session)


def test_a_chunk_that_failed_before_its_mtp_layer_is_over_with_it():
    chunk, trace = WithMtp(), random_trace(16)
    chunk.behind = True
    with watched(chunk) as seen, mrr.replay(chunk, trace, mtp=True) as session:
        session.microbatch(ROWS)
        chunk.fail_at = 1
        with pytest.raises(ArithmeticError):
            chunk(tokens(), 0)
        session.microbatch(ROWS + 8)
        chunk.predict(chunk(tokens(), 1), 1)
    assert is_replayed(seen, trace, 1) == [True] * 3
