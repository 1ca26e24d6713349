"""The package from outside: what importing it costs, its names, and arguments that are in each other's place."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.store import TraceStore, load_trace
from tests.unit.store.store_traces import make_trace

PUBLIC = (
    "RoutingTrace record replay freeze_recompute explain install uninstall "
    "save_trace load_trace concat_traces merge_traces diff_traces engines "
    "RouterReplayError capture diagnostics layout mcore store trainers transport"
).split()


def test_importing_it_loads_none_of_its_parts_and_nothing_that_takes_time():
    code = "import sys; before = set(sys.modules); import megatron_router_replay; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    loaded = {name for name in done.stdout.split() if name.split(".")[0] not in sys.stdlib_module_names}
    assert loaded == {"megatron_router_replay", "megatron_router_replay.errors", "megatron_router_replay.lazy"}


def test_public_names_are_there_and_listed_alone():
    import megatron_router_replay.testing  # noqa: F401  # no public name of the package

    assert set(PUBLIC) <= set(mrr.__all__)
    assert all(getattr(mrr, name) is not None for name in PUBLIC)
    assert dir(mrr) == sorted([*mrr.__all__, "__version__"])
    assert len(set(mrr.__all__)) == len(mrr.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'rekord'"):
        _ = mrr.rekord


def test_the_version_is_the_same_wherever_it_is_written():
    root = Path(__file__).parents[2]
    assert f"\nversion: {mrr.__version__}\n" in (root / "CITATION.cff").read_text()
    newest = re.search(r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$", (root / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] + (".dev0" if newest[2] == "unreleased" else "") == mrr.__version__


TRACE, CONFIG = make_trace(3), object()
TENSOR = TRACE.topk_indices
FIRST = "the trace comes first, as in save_trace(trace, path)"

CALLS = {
    "save_trace(path, trace)": (lambda p: mrr.save_trace(p / "x", TRACE), FIRST),
    "save_trace(text, trace)": (lambda p: mrr.save_trace(str(p), TRACE), FIRST),
    "save_trace(tensor, path)": (lambda p: mrr.save_trace(TENSOR, p / "x"), FIRST),
    "load_trace(trace)": (lambda p: load_trace(TRACE), FIRST),
    "TraceStore(trace)": (lambda p: TraceStore(TRACE), FIRST),
    "store.save(step, trace)": (lambda p: TraceStore(p, run="a").save(12, step=TRACE), "step="),
    "no step": (lambda p: TraceStore(p).load_step(1), "it has steps []"),
    "no folder": (lambda p: TraceStore(p / "a").load_step(1), "it has steps []"),
    "no file": (lambda p: load_trace(p / "a"), "cannot load"),
    "diff_traces(tensor, trace)": (
        lambda p: mrr.diff_traces(TENSOR, TRACE),
        "a is a Tensor: give a RoutingTrace, its path",
    ),
    "diff_traces(trace, None)": (lambda p: mrr.diff_traces(TRACE, None), "b is a NoneType: give a RoutingTrace"),
    "diff_traces([], trace)": (lambda p: mrr.diff_traces([], TRACE), "a is an empty list of parts"),
    "freeze_recompute(config)": (lambda p: mrr.freeze_recompute(CONFIG).__enter__(), "model_chunks must be a model"),
    "record(trace)": (lambda p: mrr.record(TRACE).__enter__(), "model_chunks must be a model"),
    "replay(trace, model)": (
        lambda p: mrr.replay(TRACE, torch.nn.Linear(1, 1)).__enter__(),
        "The arguments are swapped",
    ),
    "concat_traces(trace)": (lambda p: mrr.concat_traces(TRACE), "cannot concatenate a single trace: give a list"),
    "merge_traces(tensors)": (lambda p: mrr.merge_traces([TENSOR]), "cannot merge Tensor (number 0)"),
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
    with pytest.raises(mrr.RouterReplayError, match="cannot find step 1"):
        TraceStore(path).load_step(1)
