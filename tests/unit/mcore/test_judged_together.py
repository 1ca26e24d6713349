"""What the ranks of a replay judge together when it ends, and that nobody waits for a rank that failed."""

import gc
import time
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import megatron_router_replay as mrr
from megatron_router_replay.mcore.sessions import hold as session
from megatron_router_replay.mcore.sessions import judging, meeting
from tests.unit.mcore.tiny_chunk import ROWS, Chunk, random_trace, tokens


def numbers(
    replayed=0, live=0, padding=0, *, left_out=0, chosen=(0, 0), choice="replayed", loss_group=-1, digest=0, known=True
):
    return {
        "rows": [replayed, live, padding],
        "left_out": left_out,
        "decisions": list(chosen),
        "choice": [choice, "live"],
        "loss_group": loss_group,
        "padding_digest": digest,
        "padding_known": known,
        "agreement": None,
    }


def judge(*ranks, min_replayed=None):
    return judging.judge({2 + rank: told for rank, told in enumerate(ranks)}, least=min_replayed)  # ranks 2, 3, ...


def test_the_numbers_of_a_session_are_these():
    chunk = Chunk()
    session = mrr.replay(chunk, random_trace(8), min_agreement=0)
    assert session._numbers() == numbers()
    mrr.close_sessions(chunk)


def test_a_rank_of_padding_alone_is_in_order_beside_one_that_replays():
    assert judge(numbers(0, 0, 8), numbers(6, 2, 0)) == []
    assert judge(numbers(0, 8), numbers(1, 7)) == []
    assert judge(numbers(0, 0, 8), numbers(0, 0, 8)) == []


def test_ranks_that_replayed_nothing_raise_together():
    (problem,) = judge(numbers(0, 5), numbers(0, 3))
    assert problem.startswith("none of 8 tokens was replayed on 2 ranks; the trace has no route for any of them")
    (problem,) = judge(numbers(0, 5))
    assert problem.startswith("none of 5 tokens was replayed on this rank;")
    (problem,) = judge(numbers(0, 5, left_out=2), numbers(0, 3, left_out=1))
    assert problem.startswith("none of 8 tokens was replayed on 2 ranks: 3 were left out (trace.keep); others have no")
    assert judge(numbers(0, 5, left_out=5), numbers(0, 3), min_replayed=0) == []
    (problem,) = judge(numbers(0, 5), numbers(0, 3), min_replayed=0)
    assert "Were the routes lost on the way" in problem


@pytest.mark.parametrize(("share", "enough"), [(0.75, True), (0.76, False)])
def test_the_least_share_is_that_of_all_ranks_together(share, enough):
    problems = judge(numbers(8, 0), numbers(4, 4, 100), min_replayed=share)
    expected = "75.0000% of 16 tokens were replayed on 2 ranks, less than min_replayed=0.76."
    assert problems == ([] if enough else [expected])


def test_the_share_of_all_ranks_counts_the_decisions_that_choose_turned_down():
    ranks = numbers(8, chosen=(24, 0)), numbers(4, 4, chosen=(12, 9))
    assert judge(*ranks, min_replayed=0.5625) == [], "12 of 16 rows, of whose 36 decisions 27 were replayed"
    (problem,) = judge(*ranks, min_replayed=0.57)
    assert problem.startswith("56.2500% of 16 tokens were replayed on 2 ranks")


def test_a_share_is_not_judged_where_one_rank_does_not_know_its_padding():
    (problem,) = judge(numbers(8, 0), numbers(4, 4, known=False), min_replayed=0.76)
    assert problem.startswith("min_replayed=0.76 cannot be judged: routes came without padding= or filler=")
    assert judge(numbers(8, 0), numbers(4, 4, known=False), min_replayed=0.75) == []


def test_ranks_that_balance_otherwise_raise_first():
    (problem,) = judge(numbers(0, 8, choice="off"), numbers(0, 8))
    assert problem == "ranks replay with different expert_bias= or aux_loss=: give all of them the same."


def test_only_ranks_that_share_a_loss_must_know_padding_of_the_same_micro_batches():
    (problem,) = judge(numbers(8, loss_group=0, digest=5), numbers(8, loss_group=0, digest=6))
    assert problem.startswith("ranks that share an auxiliary loss (those of rank 0) were not told of padding")
    assert judge(numbers(8, loss_group=2, digest=5), numbers(8, loss_group=3, digest=6)) == []
    assert judge(numbers(8, digest=5), numbers(8, digest=6)) == []


def digest(*told):
    chunk = Chunk()
    with mrr.replay(chunk, random_trace(8)) as session:
        for is_told in told:
            session.microbatch(ROWS, padding=torch.zeros_like(ROWS, dtype=torch.bool) if is_told else None)
            chunk(tokens())
    return session._numbers()["padding_digest"]


def test_padding_that_is_told_in_other_micro_batches_is_told_apart():
    assert len({digest(True), digest(False), digest(True, False), digest(False, True), digest(False, False)}) == 5


# ---- two processes


def step(trace=None, *, rows=ROWS, fails=False, driven=False, too_many=False, group=None, **options):
    """One session with one micro-batch on this rank; return what it raised, or its number of replayed rows."""
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


def lost():
    """A session that nobody keeps."""
    with pytest.warns(RuntimeWarning, match="was lost"):
        mrr.replay(Chunk(), random_trace(8))
    return "lost"


FAULTS = {
    "block": (lambda: step(fails=True), "injected"),
    "forward": (lambda: step(rows=ROWS[:, :3]), "its routes are for [2, 3]"),
    "open": (lambda: step(random_trace(8, 2)), "has no routes"),
    "start": (lambda: step(driven=True), "is being driven"),
    "lost": (lost, "lost"),
}


def around_a_failure():
    """A rank fails in every way, and in between both are in order."""
    for kind, (fault, message) in FAULTS.items():
        assert step() == 8
        for failing in (0, 1, 1):
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
    assert "rank 1, chunk 0, micro-batch 1, layer 1: routes were queued, but no forward used them" in second


def at_fault():
    return step(too_many=dist.get_rank() == 1)


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


def one_by_one():
    """What stands in the job's store after several sessions, without the counters of them."""
    store = distributed_c10d._get_default_store()
    before = store.num_keys()
    counts = []
    for _ in range(8):
        step()
        dist.barrier()
        counts.append(store.num_keys() - before)
        dist.barrier()
    assert len(set(counts[1:])) == 1, counts


def test_the_store_does_not_grow_with_the_number_of_sessions(on_ranks):
    on_ranks(2, one_by_one)


def in_the_next_job(folder):
    """Rank 1 runs ahead of rank 0, which then takes away its old keys: none that it told in an earlier job."""
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


def test_a_lost_session_is_warned_of_also_where_the_store_is_gone():
    def tell(numbers):
        raise RuntimeError("the store is gone")

    with pytest.raises(RuntimeError, match="gone"), pytest.warns(RuntimeWarning, match="replay session was lost"):
        session._lost("the replay session", [], [], SimpleNamespace(tell=tell))


def without_the_other():
    meeting.TIMEOUT = timedelta(seconds=1)
    message = step(too_many=True) if dist.get_rank() == 0 else ""
    meeting.TIMEOUT = timedelta(minutes=30)
    dist.barrier()
    if dist.get_rank() == 1:
        step()  # the numbers of rank 0 are there still
    return message


def test_a_rank_that_never_comes_is_named_as_a_reason(on_ranks):
    message, _ = on_ranks(2, without_the_other)
    assert "rank 0 waited 0:00:01 at the end of its session for the 2 ranks of its group" in message
    assert "rank 0, chunk 0, micro-batch 1, layer 1: routes were queued, but no forward used them" in message
    assert on_ranks(2, step) == [8, 8]
