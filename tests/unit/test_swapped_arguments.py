"""Arguments in each other's place, and things that are not there: our own error says what to do."""

import re

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.store import TraceStore, encode_envelope, load_trace
from megatron_router_replay.trace import stale_rows
from tests.unit.store.store_traces import make_trace

TRACE, CONFIG = make_trace(3), object()
TENSOR = TRACE.topk_indices
FIRST = "the trace comes first, as in save_trace(trace, path)"

CALLS = {
    "save_trace(path, trace)": (lambda p: mrr.save_trace(p / "x", TRACE), FIRST),
    "save_trace(text, trace)": (lambda p: mrr.save_trace(str(p), TRACE), FIRST),
    "save_trace(tensor, path)": (lambda p: mrr.save_trace(TENSOR, p / "x"), FIRST),
    "load_trace(trace)": (lambda p: load_trace(TRACE), FIRST),
    "TraceStore(trace)": (lambda p: TraceStore(TRACE), FIRST),
    "encode_envelope(text)": (lambda p: encode_envelope("x"), FIRST),
    "store.save(step, trace)": (lambda p: TraceStore(p, run="a").save(12, step=TRACE), "step="),
    "store.load(step)": (lambda p: TraceStore(p).load(3), "load takes a StoredPart of parts(step)"),
    "no step": (lambda p: TraceStore(p).load_step(1), "it has no part; the folder has steps []"),
    "no folder": (lambda p: TraceStore(p / "a").load_step(1), "it has no part; there is no such folder"),
    "no file": (lambda p: load_trace(p / "a"), "cannot load"),
    "diff_traces(tensor, trace)": (
        lambda p: mrr.diff_traces(TENSOR, TRACE),
        "a is a Tensor: give a RoutingTrace, the path",
    ),
    "diff_traces(trace, None)": (lambda p: mrr.diff_traces(TRACE, None), "b is a NoneType: give a RoutingTrace"),
    "diff_traces([], trace)": (lambda p: mrr.diff_traces([], TRACE), "a is an empty list of parts"),
    "freeze_recompute(config)": (lambda p: mrr.freeze_recompute(CONFIG).__enter__(), "model_chunks must be a model"),
    "record(trace)": (lambda p: mrr.record(TRACE).__enter__(), "model_chunks must be a model"),
    "replay(trace, model)": (
        lambda p: mrr.replay(TRACE, torch.nn.Linear(1, 1)).__enter__(),
        "The arguments are swapped",
    ),
    "capture(model)": (lambda p: mrr.capture(torch.nn.Linear(1, 1)), "mrr.capture.watch(model)"),
    "concat_traces(trace)": (lambda p: mrr.concat_traces(TRACE), "cannot concatenate one trace by itself: give a list"),
    "merge_traces(tensors)": (lambda p: mrr.merge_traces([TENSOR]), "cannot merge Tensor (number 0)"),
    "stale_rows(tensor)": (lambda p: stale_rows(TENSOR, max_age=1, trainer_version=1), "Tensor (number 0)"),
    "append(tensor)": (lambda p: mrr.engines.RoutingSegments().append(TENSOR), "cannot append a Tensor"),
    "decode(model=trace)": (lambda p: mrr.engines.vllm.decode(TENSOR, model=TRACE), "a model config is a dict, a path"),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_is_in_the_wrong_place_is_said(call, tmp_path):
    attempt, advice = CALLS[call]
    with pytest.raises(mrr.RouterReplayError, match=re.escape(advice)):
        attempt(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_a_store_is_meant_has_no_steps(tmp_path):
    path = mrr.save_trace(TRACE, tmp_path / "x")
    with pytest.raises(mrr.RouterReplayError, match="cannot load step 1"):
        TraceStore(path).load_step(1)
