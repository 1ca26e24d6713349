"""The log of a run: what is written, and what the verifier finds when lines or numbers are not right."""

import json

import pytest
import torch

from megatron_router_replay.diagnostics.runlog import RunLog, compare_runs, read_run, verify_run
from megatron_router_replay.errors import ReplayStateError, StoreError
from tests.unit.store.store_traces import make_trace

TRACE = make_trace(8, replay_mask=torch.arange(8) != 3)
ROWS = [torch.tensor([[0, 1, 2, -1]]), torch.tensor([[3, 4, 5, -1]])]


class Report:
    def __init__(self, **changes):
        self.values = {
            "kind": "replay",
            "microbatches": 2,
            "tokens": 8,
            "rows_replayed": 5,
            "rows_live": 1,
            "rows_padding": 2,
            "forwards": 6,
            "recomputes": 6,
            "decisions_wrong": 0,
        } | changes

    def to_dict(self):
        return self.values


def write(path, trace=TRACE, report=None, steps=(1,)):
    with RunLog(path, rank=2) as log:
        for step in steps:
            log.begin(step=step)
            for rows in ROWS:
                log.microbatch(rows, trace, padding=rows < 0)
            log.end(report or Report())
    return path


def test_a_right_log_adds_up(tmp_path):
    check = verify_run(write(tmp_path / "a.jsonl", steps=(1, 2)))
    assert (check.sessions, check.microbatches, check.rows_replayed, check.problems) == (2, 4, 10, ())
    assert "everything adds up" in str(check)


def test_the_lines_are_as_documented(tmp_path):
    records = list(read_run(write(tmp_path / "a.jsonl")))
    assert [record["event"] for record in records] == ["run", "begin", "microbatch", "microbatch", "end"]
    assert records[0]["rank"] == 2
    second = records[3]
    assert [second[key] for key in ("rows", "replayed", "live", "padding")] == [4, 2, 1, 1]
    assert list(second["checksums"]) == ["2", "3", "7"]
    assert all(len(value) == 16 for value in second["checksums"].values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows_replayed": 4, "rows_live": 2}, "reports rows_replayed=4, its micro-batches add up to 5"),
        ({"microbatches": 1}, "reports microbatches=1, its micro-batches add up to 2"),
        ({"forwards": 3}, "reports forwards=3, its micro-batches add up to 6"),
        ({"tokens": 9}, "do not add up to tokens=9"),
        ({"decisions_wrong": 3}, "3 decisions left their router with other experts"),
        ({"microbatches": 2.0}, "reports microbatches=2.0, its micro-batches add up to 2"),
    ],
)
def test_a_report_that_does_not_add_up_is_named(tmp_path, changes, message):
    problems = verify_run(write(tmp_path / "a.jsonl", report=Report(**changes))).problems
    assert any(message in problem for problem in problems), problems


def test_true_is_no_count_of_one(tmp_path):
    for name in ("microbatches", "tokens", "rows_replayed", "forwards"):
        with RunLog(tmp_path / f"{name}.jsonl") as log:
            log.begin(step=1)
            log.microbatch(torch.tensor([[0]]), make_trace(8, layer_numbers=(2,)))
            counts = {
                "microbatches": 1,
                "tokens": 1,
                "rows_replayed": 1,
                "rows_live": 0,
                "rows_padding": 0,
                "forwards": 1,
            }
            log.end(Report(**counts | {name: True}))
        problems = verify_run(tmp_path / f"{name}.jsonl").problems
        assert any(f"reports {name}=True" in problem for problem in problems), (name, problems)


def test_sequence_parallel_ranks_count_their_part(tmp_path):
    with RunLog(tmp_path / "a.jsonl") as log:
        log.begin(step=1, tp_size=2)
        for rows in ROWS:
            log.microbatch(rows, TRACE, padding=rows < 0)
        log.end(Report(tokens=4, rows_replayed=3, rows_live=0, rows_padding=1))
    assert verify_run(tmp_path / "a.jsonl").problems == ()


def test_chunks_without_routers_are_not_counted(tmp_path):
    with RunLog(tmp_path / "a.jsonl") as log:
        log.begin(step=1)
        for rows in ROWS:
            log.microbatch(rows, TRACE, padding=rows < 0, layer_numbers=[2, 3, 7])
            log.microbatch(rows, TRACE, padding=rows < 0, layer_numbers=[], chunk=1)
        log.end(Report())
    assert verify_run(tmp_path / "a.jsonl").problems == ()


def test_a_run_that_stopped_inside_a_session_says_so(tmp_path):
    path = write(tmp_path / "a.jsonl")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert verify_run(path).problems == ("session 0 (step 1) has no end: the run stopped inside it",)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: [*lines[:2], *lines[3:]], "line 3 has seq 3, expected 2"),
        (lambda lines: [*lines[:-1], lines[-1][:20]], "line 5 is no JSON"),
        (lambda lines: [*lines, "{}\n"], "line 6 is no record"),
        (lambda lines: [*lines, "[1]\n"], "line 6 is no record"),
        (lambda lines: [], "it is empty"),
    ],
)
def test_damaged_logs_are_refused(tmp_path, damage, message):
    path = write(tmp_path / "a.jsonl")
    path.write_text("".join(damage(path.read_text().splitlines(keepends=True))))
    with pytest.raises(StoreError, match=message):
        verify_run(path)


def test_two_runs_are_compared_by_their_checksums(tmp_path):
    a = write(tmp_path / "a.jsonl", steps=(1, 2))
    assert compare_runs(a, write(tmp_path / "same.jsonl", steps=(1, 2))) == []
    routes = TRACE.topk_indices.clone()
    routes[4, 1] = torch.tensor([0, 1] if set(routes[4, 1].tolist()) != {0, 1} else [2, 3])
    other = write(tmp_path / "b.jsonl", trace=TRACE._with(topk_indices=routes), steps=(1, 2))
    first, second = compare_runs(a, other)
    assert first.startswith("step 1: 1 of 6 checksums differ, first session 0, micro-batch 1, layer 3:")
    assert second.startswith("step 2: ")


def test_calls_out_of_order_and_existing_files_are_refused(tmp_path):
    log = RunLog(tmp_path / "a.jsonl")
    with pytest.raises(ReplayStateError, match="no session is open"):
        log.microbatch(ROWS[0], TRACE)
    log.begin(step=1)
    with pytest.raises(ReplayStateError, match="no end"):
        log.begin(step=2)
    log.metrics(1, {"loss": 1})
    log.close()
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[-1])["values"] == {"loss": 1.0}
    with pytest.raises(StoreError, match="cannot write the log"):
        RunLog(tmp_path / "a.jsonl")


def test_a_row_of_minus_one_that_is_not_padding_is_live(tmp_path):
    with RunLog(tmp_path / "a.jsonl") as log:
        log.begin(step=1)
        log.microbatch(ROWS[0], TRACE)
        log.microbatch(ROWS[0], TRACE, padding=ROWS[0] < 0)
        log.end(Report())
    counts = [
        [record[key] for key in ("live", "padding")] for record in read_run(tmp_path / "a.jsonl") if "live" in record
    ]
    assert counts[0] == [counts[1][0] + 1, 0]
    assert counts[1][1] == 1
