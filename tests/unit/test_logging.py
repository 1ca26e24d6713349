"""The library logs each event once through `logging`, and prints nothing unless a program configures it."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay import checks
from megatron_router_replay.mcore.judge.report import SessionReport, log_ended
from tests.unit.mcore.tiny_chunk import Chunk, random_routes, tokens

DEMO = Path(mrr.__file__).parent / "demo" / "data"
RESPONSE = DEMO / "vllm_0.30.0_bf16_response.json"


def messages(caplog, level=logging.INFO):
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


@pytest.fixture
def trace():
    return mrr.RoutingTrace(topk_indices=random_routes(8), layer_numbers=[1, 2, 3], num_experts=8)


def test_decoding_says_how_many_rows_have_a_route(caplog):
    caplog.set_level(logging.INFO, "megatron_router_replay")
    mrr.engines.vllm.decode(json.loads(RESPONSE.read_text())["response"]["choices"][0], model=str(DEMO))
    assert messages(caplog) == ["vLLM: decoded 1 samples: 48 tokens, 47 with a route, 3 MoE layers"]


def test_a_session_says_when_it_begins_and_what_it_did(trace, caplog):
    caplog.set_level(logging.INFO, "megatron_router_replay")
    chunk = Chunk()
    with mrr.replay(chunk, trace) as session:
        session.microbatch(torch.arange(8).view(2, 4))
        chunk(tokens())
    assert messages(caplog) == [
        "replay session began with 3 routers",
        "replay session ended: 1 micro-batches, 3 forwards, 0 recomputes, rows 8 replayed, 0 live, 0 padding",
    ]


def test_a_session_left_by_an_exception_says_that_nothing_was_verified(trace, caplog):
    caplog.set_level(logging.INFO, "megatron_router_replay")
    with pytest.raises(ZeroDivisionError), mrr.replay(Chunk(), trace):
        _ = 1 / 0
    assert messages(caplog)[-1] == (
        "replay session was left by ZeroDivisionError; the routers are released, nothing was checked"
    )


def test_a_warning_is_shown_once_a_cause_and_logged_each_time(caplog, monkeypatch):
    monkeypatch.setattr(checks, "_warned", set())
    lossy = SessionReport(kind="replay", rows_replayed=1, rows_live=1, rows_repeated=3)
    with pytest.warns(RuntimeWarning) as shown:
        log_ended(lossy)
    log_ended(lossy)
    assert len(shown) == 2
    texts = [str(warning.message) for warning in shown]
    assert [text.split()[0] for text in texts] == ["only", "3"]
    assert messages(caplog, logging.WARNING) == texts * 2


@pytest.mark.parametrize(
    ("kind", "rows", "words"),
    [
        ("replay", {"rows_replayed": 9, "rows_live": 1}, ""),  # nine tenths exactly
        ("replay", {"rows_replayed": 89, "rows_live": 11}, "only 89.0 % of the tokens were replayed (89 of 100)"),
        ("replay", {"rows_padding": 8}, ""),
        ("record", {"rows_live": 8}, ""),
    ],
)
def test_only_a_replay_that_lost_more_than_a_tenth_of_its_routes_warns(kind, rows, words, caplog):
    log_ended(SessionReport(kind=kind, **rows))
    warnings = messages(caplog, logging.WARNING)
    assert len(warnings) == bool(words)
    assert all(text.startswith(words) for text in warnings)


def test_nothing_is_printed_by_itself_not_even_a_warning():
    code = "import logging, megatron_router_replay; logging.getLogger('megatron_router_replay.x').warning('low')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert (done.stdout, done.stderr) == ("", "")
