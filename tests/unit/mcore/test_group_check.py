"""Ranks of a replay are judged together at its end, and no rank waits for one that failed."""

import gc
import json
import random
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import megatron_router_replay as mrr
from megatron_router_replay.checks import _warned
from megatron_router_replay.mcore.batches.forward_counts import ForwardCounts
from megatron_router_replay.mcore.core.hooks import sources_of
from megatron_router_replay.mcore.judge.group_check import GroupCheck, _of_json, _to_json
from megatron_router_replay.mcore.judge.group_result import (
    GroupResult,
    RankSummary,
    group_result,
    replay_problems,
    stages_with_other_rows,
)
from megatron_router_replay.mcore.judge.rank_evidence import Anomaly, RankAgreement
from megatron_router_replay.mcore.judge.sums import Sums
from megatron_router_replay.mcore.judge.verdict import group_verdict
from tests.unit.mcore.tiny_chunk import ROWS, Chunk, random_trace, tokens


def summary(replayed=0, live=0, padding=0, *, min_replayed=None, min_agreement=0, **others):
    counts = ForwardCounts(rows_replayed=replayed, rows_live=live, rows_padding=padding)
    return RankSummary(chunks=1, options=[min_replayed, min_agreement, "raise"], counts=counts, **others)


def test_the_summary_of_a_rank_is_this():
    told = []
    session = mrr.replay(Chunk(), random_trace(8), min_agreement=0)
    session._microbatches.group_check = SimpleNamespace(finish=lambda told_by: told.append(told_by) or GroupResult())
    session.close()
    assert told == [summary()]


N = summary
LOST = "none of {}; the trace has no route for any of them, or all rows are -1. Were the routes lost on the way, "
OPTIONS = "ranks replay with different min_replayed=, min_agreement= or wrong_routes="

# Numbers of the ranks of a group, min_replayed, and the beginning of their one problem; None: they are in order.
JUDGED = [
    # One rank may have padding alone, or nothing.
    ([N(0, 0, 8), N(6, 2, 0)], None, None),
    ([N(0, 8), N(1, 7)], None, None),
    ([N(), N(4)], None, None),
    ([N()._replace(chunks=0)], None, None),  # a stage without routers
    ([N(0, 0, 8)] * 2, None, "none of 16 tokens was replayed on 2 ranks, for padding= calls all of them padding."),
    ([N()] * 2, None, "nothing was replayed on 2 ranks: no forward of the model reached all of its routers"),
    ([N()], 0, None),
    ([N(at_fault=True), N()], None, None),  # whose own error says that a layer was skipped
    ([N(0, 0, 8)], 0, None),
    ([N(0, 5), N(0, 3)], None, LOST.format("8 tokens was replayed on 2 ranks")),
    ([N(0, 5)], None, LOST.format("5 tokens was replayed on this rank")),
    ([N(0, 5), N(0, 3)], 0, LOST.format("8 tokens was replayed on 2 ranks")),
    # The share is that of all ranks, without padding.
    ([N(8, 0), N(4, 4, 100)], 0.75, None),
    ([N(8, 0), N(4, 4, 100)], 0.76, "75.0000% of 16 tokens were replayed on 2 ranks, less than min_replayed=0.76."),
    # n / 100 * 100 > n in floating point
    *(([N(rows, 100 - rows)], rows / 100, None) for rows in (7, 28, 55, 56, 100)),
    ([N(4, 4)], 0.51, "50.0000% of 8 tokens were replayed on this rank, less than min_replayed=0.51."),
    # Ranks with different options raise first.
    ([N(0, 8, min_replayed=0.5), N(0, 8)], None, OPTIONS),
    ([N(0, 8, min_replayed=0.5), N(0, 8)], None, OPTIONS),
    ([N(0, 8, min_agreement=0.25), N(0, 8)], None, OPTIONS),
]


@pytest.mark.parametrize(("ranks", "least", "problem"), JUDGED)
def test_what_ranks_tell_is_judged_together(ranks, least, problem):
    problems = replay_problems({2 + rank: told for rank, told in enumerate(ranks)}, least)  # ranks 2, 3, ...
    assert len(problems) == (problem is not None)
    assert problem is None or problems[0].startswith(problem)


IDLE = [
    # Numbers of the ranks 2, 3, ... of a group -> those with routers that ran no forward, where others did.
    ([N(), N(4)], [2]),
    ([N(4), N(), N(0, 3), N()], [3, 5]),
    ([N(), N()], None),
    ([N(4), N(0, 0, 8)], None),  # a dummy of padding is a forward
    ([N(4), N()._replace(chunks=0)], None),  # a stage without routers
    ([N(4, min_replayed=0), N(min_replayed=0)], None),  # a step may have no micro-batch
]


@pytest.mark.parametrize(("ranks", "idle"), IDLE)
def test_a_rank_that_ran_no_forward_where_others_did_is_named(ranks, idle):
    told = {2 + rank: each for rank, each in enumerate(ranks)}
    warnings = group_result(told).warnings
    assert list(warnings) == ["a rank without a forward"] * bool(idle)
    if idle:
        text = warnings["a rank without a forward"]
        assert text.startswith(f"ranks {idle} have routers and ran no forward inside their session, ranks ")


def test_a_step_without_a_micro_batch_is_told_how_to_allow_that():
    (problem,) = replay_problems({0: N()}, None)
    assert problem.endswith("For a step that may have no micro-batch, pass min_replayed=0.")
    with mrr.replay(Chunk(), random_trace(8), min_replayed=0):
        pass


def test_an_engine_gives_no_route_to_the_last_token_where_every_row_must_have_one():
    for least, ends in ((1, "its traces never reach 1."), (0.51, "less than min_replayed=0.51.")):
        (problem,) = replay_problems({0: N(4, 4)}, least)
        assert problem.endswith(ends)


@pytest.mark.parametrize(("wrong_routes", "counts"), [("raise", (1, 0)), ("warn", (0, 1))])
def test_wrong_routes_raise_or_warn(wrong_routes, counts):
    agreement = RankAgreement(anomalies=[Anomaly(72.0, "rows")])
    told = N(8, agreement=agreement)._replace(options=[None, 0.25, wrong_routes])
    result = GroupCheck(None).finish(told)
    assert (len(result.problems), len(result.warnings)) == counts


STAGES = {
    # the stage of each rank: lowest rank of its pipeline, stage, digests of chunks -> the stage that is named; "": none is
    "the same": ([(0, 0, [[2, 7]]), (0, 1, [[2, 7]])], ""),
    "other rows": ([(0, 0, [[2, 7]]), (0, 1, [[2, 8]])], "pipeline stage 1 (rank 1) found other rows"),
    "a later chunk": (
        [(0, 0, [[2, 7], [2, 8]]), (0, 1, [[2, 7], [2, 7]])],
        "pipeline stage 0 (rank 0) found other rows",
    ),
    "fewer": ([(0, 0, [[2, 7]]), (0, 1, [[1, 7]])], "pipeline stage 1 (rank 1) routed 1 micro-batches, not 2"),
    "two pipelines": ([(0, 0, [[2, 7]]), (1, 0, [[2, 8]]), (0, 1, [[2, 7]]), (1, 1, [[2, 8]])], ""),
    "one stage": ([None, None], ""),
}


@pytest.mark.parametrize("name", STAGES)
def test_pipeline_stages_must_have_had_the_same_rows(name):
    stages, expected = STAGES[name]
    everyone = {rank: N(8)._replace(stage=stage) for rank, stage in enumerate(stages)}
    problems = stages_with_other_rows(everyone)
    assert [problem.startswith(expected) for problem in problems] == [True] * bool(expected)
    at_fault = everyone | {9: N(at_fault=True)}
    assert stages_with_other_rows(at_fault) == []


def test_four_pipeline_stages_are_named_at_most():
    everyone = {rank: N(8)._replace(stage=(0, rank, [[2, 7 + rank]])) for rank in range(6)}
    named = [problem.partition(" found")[0] for problem in stages_with_other_rows(everyone)]
    assert named == [f"pipeline stage {rank} (rank {rank})" for rank in (1, 2, 3, 4)]


def test_a_skipped_layer_is_the_one_error_of_its_session():
    """Its rows count as not replayed; but a forward came, so no second line may say that none did."""
    chunk = Chunk()
    session = mrr.replay(chunk, random_trace(8))
    session.microbatch(ROWS)
    chunk.routers[0](torch.randn(4, 2, chunk.routers[0].weight.shape[1]))
    with pytest.raises(mrr.RouterReplayError) as error:
        session.close()
    first, advice = str(error.value).splitlines()[1:]
    assert first == "  rank 0, chunk 0, micro-batch 0: its layer 2, layer 3 was not forwarded"
    assert advice.startswith("  A session is checked at the end of its block")


# ---- two processes


def step(trace=None, *, rows=ROWS, fails=False, driven=False, too_many=False, group=None, **options):
    """One session with one micro-batch on this rank; return its error, or its number of replayed rows."""
    chunk = Chunk()
    if driven:
        chunk.routers[1].router_replay = SimpleNamespace(router_replay_action="REPLAY_FORWARD")
    try:
        with mrr.replay(chunk, random_trace(8) if trace is None else trace, group=group, **options) as session:
            session.microbatch(rows)
            if fails:
                raise ArithmeticError("injected")
            chunk(tokens())
            if too_many:
                session.microbatch(rows)
    except (ArithmeticError, mrr.RouterReplayError) as error:
        return str(error)
    return session.report.rows_replayed


FAULTS = {
    "block": (lambda: step(fails=True), "injected"),
    "forward": (lambda: step(rows=ROWS[:, :3]), "its routes are for [2, 3]"),
    "open": (lambda: step(random_trace(8, 2)), "has no routes"),
    "start": (lambda: step(driven=True), "is being driven"),
}


def around_a_failure():
    """A rank fails in every way, and in between both are in order."""
    for kind, (fault, message) in FAULTS.items():
        assert step() == 8
        for failing in (0, 1):
            here = dist.get_rank() == failing
            result = fault() if here else step()
            others = f"ranks [{failing}] left their session by an exception, or could"
            assert (message if here else others) in result, kind
    assert step() == 8


def test_nobody_waits_for_a_rank_that_failed_and_later_sessions_are_right(on_ranks):
    on_ranks(2, around_a_failure)


def test_a_rank_that_is_in_order_says_which_are_not(on_ranks):
    first, second = on_ranks(2, at_fault)
    assert "rank 0 is in order, but ranks [1] are not" in first
    assert "rank 1, chunk 0, micro-batch 1, layer 1: rows were given, but no forward used them" in second


def at_fault():
    return step(too_many=dist.get_rank() == 1)


def rebuilt_on_a_rank():
    """A check of rank 1 fails itself: its model got a router that was never numbered."""
    chunk, rank = Chunk(), dist.get_rank()
    routers = chunk.routers
    session = mrr.replay(chunk, random_trace(8))
    session.microbatch(ROWS)
    chunk(tokens())
    if rank == 1:
        chunk.layers[1].router = Chunk().routers[1]
        chunk.layers[1].router.layer_number = None
    with pytest.raises(mrr.RouterReplayError) as error:
        session.close()
    assert not any(map(sources_of, routers))
    return str(error.value)


def test_a_check_that_fails_itself_releases_the_routers_and_no_rank_waits(on_ranks):
    first, second = on_ranks(2, rebuilt_on_a_rank)
    assert "ranks [1] left their session by an exception" in first
    assert "has no layer_number" in second


def in_groups():
    """Each rank alone and both together, in turns; a share that only one of them reaches."""
    rank = dist.get_rank()
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    both = dist.new_group([0, 1])
    rows = torch.where(ROWS < 4, ROWS, -1) if rank else ROWS  # rank 1 replays half
    for _ in range(2):
        on_its_own, *together = [step(rows=rows, group=group, min_replayed=0.6) for group in (alone, both, None)]
        if rank:
            assert "50.0000% of 8 tokens were replayed on this rank, less than min_replayed=0.6" in on_its_own
        assert together == [4 if rank else 8] * 2
    if rank == 0:  # the other has no such session
        assert (step(group=alone, fails=True), step(group=alone)) == ("injected", 8)


def test_the_ranks_of_a_group_judge_together_and_groups_do_not_mix(on_ranks):
    on_ranks(2, in_groups)


def in_the_next_job(folder):
    """Rank 1 runs ahead of rank 0, which then takes away its old keys: none of an earlier job."""
    rank = dist.get_rank()
    step()
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    with mrr.replay(policy := Chunk(), random_trace(8)) as outer:
        with suppress(ArithmeticError, mrr.RouterReplayError), mrr.replay(Chunk(), random_trace(8)):
            if rank == 1:
                raise ArithmeticError
            time.sleep(0.5)
        outer.microbatch(ROWS)
        policy(tokens())


def test_what_was_told_in_an_earlier_job_takes_nothing_away_in_the_next(on_ranks, tmp_path):
    on_ranks(2, in_the_next_job, str(tmp_path))


def without_the_other():
    store = distributed_c10d._get_default_store()
    store.set_timeout(timedelta(seconds=1))
    message = step(too_many=True) if dist.get_rank() == 0 else ""
    store.set_timeout(timedelta(minutes=30))
    dist.barrier()
    if dist.get_rank() == 1:
        step()  # the numbers of rank 0 are there still
    return message


def trained_after_its_session():
    """Rank 1 closes its session first, and trains then."""
    chunk = Chunk()
    session = mrr.replay(chunk, random_trace(8))
    if dist.get_rank() == 0:
        session.microbatch(ROWS)
        chunk(tokens())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _warned.discard("a rank without a forward")
        session.close()
    chunk(tokens())
    return [str(each.message) for each in told]


def test_a_rank_that_trains_after_its_session_is_warned_of_on_all_ranks(on_ranks):
    for told in on_ranks(2, trained_after_its_session):
        assert [text.partition(".")[0] for text in told] == [
            "ranks [1] have routers and ran no forward inside their session, ranks [0] did"
        ]


def test_a_rank_that_never_comes_is_named_as_a_reason(on_ranks):
    message, _ = on_ranks(2, without_the_other)
    assert "rank 0 waited 0:00:01 at the end of its session for the 2 ranks of its group" in message
    assert "Open the session on every rank that trains; give group= only where ranks hold different models." in message
    assert "rank 0, chunk 0, micro-batch 1, layer 1: rows were given, but no forward used them" in message
    assert on_ranks(2, step) == [8, 8]


# ---- requests to the job's store


class Requests:
    """A store that counts requests of one rank, and their bytes."""

    def __init__(self, store):
        self.store, self.timeout = store, timedelta(seconds=20)
        self.names, self.num_bytes = [], 0

    def __getattr__(self, name):
        def ask(*arguments):
            answer = getattr(self.store, name)(*arguments)
            self.names.append(name)
            self.num_bytes += len(repr(arguments)) + len(repr(answer))
            return answer

        return ask


def as_job(monkeypatch, size, rank, store):
    """Let torch.distributed have so many ranks; `rank` and `store` return this thread's."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: size)
    monkeypatch.setattr(distributed_c10d, "_get_default_store", store)


def settled(monkeypatch, size, *, sessions, failing=()):
    """Run the ranks of a job as threads; return each store, which counts the last session, and the number of keys left."""
    shared = dist.HashStore()
    shared.set_timeout(timedelta(seconds=20))
    rank = threading.local()
    stores = [Requests(shared) for _ in range(size)]
    as_job(monkeypatch, size, lambda: rank.number, lambda: stores[rank.number])

    def run(number):
        rank.number = number
        for session in range(sessions):
            failed = failing if session < sessions - 2 else ()
            stores[number].names, stores[number].num_bytes = [], 0
            check = GroupCheck(None)
            if number in failed:
                check.fail()
                continue
            result = check.finish(summary(number, 1))
            assert (result.problems, result.left) == ([], list(failed))

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(run, range(size)))
    return stores, shared.num_keys()


@pytest.mark.parametrize("size", [8, 96])
def test_a_session_asks_the_store_five_times_a_rank_and_six_on_the_first_however_many_there_are(monkeypatch, size):
    stores, _ = settled(monkeypatch, size, sessions=3)
    assert max(store.num_bytes for store in stores) < 65536
    ends = {("add", "set", "get", "delete_key"), ("add", "multi_get", "set", "delete_key")}
    first, *others = (tuple(store.names) for store in stores)
    assert (first[:2], first[2:] in ends) == (("add", "delete_key"), True)
    assert {names[:1] for names in others} == {("add",)}
    assert {names[1:] for names in others} <= ends


@pytest.mark.parametrize("failing", [(), (0,), (2,)])
def test_the_store_holds_as_many_keys_after_nine_sessions_as_after_three(monkeypatch, failing):
    """Also where a rank fails in every session but the last two, which take the keys of the earlier ones away."""

    few, many = (settled(monkeypatch, 4, sessions=sessions, failing=failing)[1] for sessions in (3, 9))
    assert many == few


def test_a_rank_that_fails_after_the_store_has_ended_keeps_its_own_error(monkeypatch, caplog):
    """The process that serves the store may end first: a DistNetworkError must not hide the rank's error."""

    def gone(*arguments):
        raise dist.DistNetworkError("failed to recv, got 0 bytes")

    store = Requests(dist.HashStore())
    as_job(monkeypatch, 2, lambda: 0, lambda: store)
    check = GroupCheck(None)
    store.store = SimpleNamespace(add=gone)
    check.fail()
    assert "could not publish it: failed to recv" in caplog.text


def test_an_empty_recording_raises_as_an_empty_replay_does():
    chunk = Chunk()
    with pytest.raises(mrr.RouterReplayError, match="nothing was recorded on this rank"), mrr.record(chunk):
        pass
    recording = mrr.record(chunk)
    with recording.paused():
        chunk(tokens())
    with pytest.raises(mrr.RouterReplayError, match="nothing was recorded"):
        recording.close()
    with mrr.record(chunk, padding_token_ids=[]):
        chunk(tokens())


def agreement_of(rank, *anomalies, layers=58):
    """What a rank of 1,024 has after it compared all layers; eight tensor-parallel places."""
    numbers = random.Random(rank)
    sums = {
        number: Sums(float(numbers.randrange(10_000)), *(numbers.random() * 30_000 for _ in range(4)))
        for number in range(1, layers + 1)
    }
    return RankAgreement(
        replica=rank % 8,
        layers=sums,
        anomalies=[Anomaly(evidence, f"rank {rank}: {evidence}") for evidence in anomalies],
        rows_apart=3,
        trace="1048576 12345",
    )


@pytest.mark.parametrize("evidence", [71.9, 72.0, 80.5])
def test_a_rank_publishes_what_is_judged_and_no_more(evidence):
    """Of 58 layers, less than 3 kB; the ranks that read it come to the same verdict."""
    everyone = [agreement_of(rank, 3.5, 70.0, evidence, 12.0 if rank else 72.5) for rank in range(16)]
    published = [_of_json(json.loads(json.dumps(_to_json(summary(agreement=each))))).agreement for each in everyone]
    for least in (0.01, 0.25, 0.9):
        assert group_verdict(published, least) == group_verdict(everyone, least)
    assert bool(group_verdict(published, 1e-9).problems)
    assert max(len(each.anomalies) for each in published) == 1
    texts = [json.dumps(_to_json(summary(agreement=each)), separators=(",", ":")) for each in everyone]
    assert max(map(len, texts)) < 3_000
    assert _to_json(None) is None
    assert _of_json(json.loads(json.dumps(_to_json(None)))) is None
    assert _of_json(json.loads(json.dumps(_to_json(summary(1, 2, 3))))) == summary(1, 2, 3)
