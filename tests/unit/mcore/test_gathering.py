"""gather() over many ranks, which are threads here: the bytes that each of them sends, and the trace that all of them get."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import megatron_router_replay as mrr
from megatron_router_replay import together
from megatron_router_replay.errors import TraceError
from megatron_router_replay.mcore.sessions import gathering
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.join import PartJoiner
from megatron_router_replay.trace.merge import merge_traces
from tests.unit.mcore.tiny_chunk import ROWS, Chunk, tokens

NUM_STAGES, TOPK = 4, 2


class Threads:
    """As many ranks of a group as threads, and the bytes that each of them sent."""

    def __init__(self, num_ranks):
        self.num_ranks, self.sent = num_ranks, [0] * num_ranks
        self._here, self._barrier, self._slot = threading.local(), threading.Barrier(num_ranks), {}
        self.num_messages, self.most_under_way = 0, 0

    def run(self, monkeypatch, parts, replicas=None, catch=()):
        stand_in = SimpleNamespace(
            get_world_size=lambda *_: self.num_ranks,
            get_rank=lambda *_: self._here.rank,
            all_gather_object=self._all_gather_object,
            broadcast=self._broadcast,
            is_initialized=lambda: True,
        )
        monkeypatch.setattr(gathering, "dist", stand_in)
        monkeypatch.setattr(together, "dist", stand_in)
        monkeypatch.setattr(gathering, "collective_device", lambda group: torch.device("cpu"))

        def one(rank):
            self._here.rank = rank
            try:
                return gathering.gather_trace(parts[rank], None, replicas and replicas[rank])[0]
            except catch as error:
                return error

        with ThreadPoolExecutor(self.num_ranks) as pool:
            return list(pool.map(one, range(self.num_ranks)))

    def _all_gather_object(self, values, value, group):
        self._slot[self._here.rank] = value
        self._barrier.wait(60)
        values[:] = [self._slot[rank] for rank in range(self.num_ranks)]
        self._barrier.wait(60)

    def _broadcast(self, message, src, group, async_op):
        """Deliver the message when it is waited for, and no sooner."""
        assert async_op
        number = self._here.begun = getattr(self._here, "begun", -1) + 1
        under_way = self._here.under_way = getattr(self._here, "under_way", 0) + 1
        if src == self._here.rank:
            self._slot["message", number], self.sent[src] = message.clone(), self.sent[src] + message.nbytes
            message.zero_()
            self.num_messages += 1
            self.most_under_way = max(self.most_under_way, under_way)
        self._barrier.wait(60)
        assert message.shape == self._slot["message", number].shape

        def wait():
            message.copy_(self._slot["message", number])
            self._here.under_way -= 1

        return SimpleNamespace(wait=wait)


def parts_of(num_ranks, num_tokens):
    """Four pipeline stages of two layers each; the other ranks are data-parallel, and neighbours share four rows."""
    whole = torch.rand(num_tokens, 2 * NUM_STAGES, 16).topk(TOPK, dim=2).indices
    step, parts = num_tokens // (num_ranks // NUM_STAGES), []
    for rank in range(num_ranks):
        stage, share = rank % NUM_STAGES, rank // NUM_STAGES
        rows = torch.arange(num_tokens)
        routed = (rows >= share * step) & (rows < (share + 1) * step + 4)
        routed[3 if stage == 1 else 5] = False  # row 3 is recorded in some layers only
        parts.append(
            RoutingTrace(
                topk_indices=whole[:, 2 * stage : 2 * stage + 2],
                layer_numbers=(2 * stage + 1, 2 * stage + 2),
                num_experts=16,
                replay_mask=routed,
                token_ids=torch.where(routed | (rows == 7), rows + 100, -1) if stage else None,
            )
        )
    return parts


@pytest.mark.parametrize(("piece_bytes", "num_messages"), [(1 << 20, 8), (50, 83)])
def test_every_rank_gets_the_merged_trace_and_sends_its_routed_rows_alone(monkeypatch, piece_bytes, num_messages):
    monkeypatch.setattr(gathering, "_PIECE_BYTES", piece_bytes)
    parts, threads = parts_of(8, 64), Threads(8)
    expected = merge_traces(parts, allow_gaps=True)
    assert not expected.replay_mask[3]
    for trace in threads.run(monkeypatch, parts):
        assert trace == expected
        assert torch.equal(trace.topk_indices, expected.topk_indices)
    for part, sent in zip(parts, threads.sent):
        rows = int((part.replay_mask if part.token_ids is None else part.replay_mask | (part.token_ids != -1)).sum())
        # Two layers of top-2, a mask byte, four bytes of a token id, and four of the row's number.
        assert sent == rows * (4 + 1 + 4 * (part.token_ids is not None) + 4)
    # A message has all fields of its rows, and those of different ranks are under way together. Of 50 bytes, it has 5 rows
    # without a token id, or 3 with one: 35 and 32 rows of 9 bytes are 7 + 7, 35 and 33 of 13 bytes are 3 * (12 + 11).
    assert (threads.num_messages, threads.most_under_way) == (num_messages, 8)


@pytest.mark.parametrize("other", [{"num_experts": 17}, {"topk": 3}])
def test_recordings_of_two_models_raise(monkeypatch, other):
    sizes = [{"num_experts": 16, "topk": 2}, {"num_experts": 16, "topk": 2} | other]
    parts = [
        RoutingTrace(
            topk_indices=torch.arange(size["topk"]).expand(4, 1, -1),
            layer_numbers=(rank + 1,),
            num_experts=size["num_experts"],
        )
        for rank, size in enumerate(sizes)
    ]
    with pytest.raises(TraceError, match="MRR107: cannot gather recordings of different models"):
        Threads(2).run(monkeypatch, parts)


def test_samples_of_replicas_follow_one_another_in_the_order_of_replicas(monkeypatch):
    """Two replicas of two ranks, each of which routed every second row; a rank of either has a stage without MoE layers."""
    whole = torch.rand(6, 2, 16).topk(TOPK, dim=2).indices
    replicas, parts = [(1,), (0,), (1,), (0,), (1,), (0,)], []
    for rank, (replica,) in enumerate(replicas):
        rows, lengths = (slice(4, 6), [2]) if replica else (slice(4), [3, 1])
        routed = torch.arange(6)[rows] % 2 == rank // 2
        ids = torch.where(routed, torch.arange(100, 106)[rows], -1)
        options = {"replay_mask": routed, "token_ids": ids, "sequence_lengths": lengths}
        parts.append(RoutingTrace(topk_indices=whole[rows], layer_numbers=(1, 2), num_experts=16, **options))
    parts[4:] = [RoutingTrace(topk_indices=whole[:0, :0], layer_numbers=(), num_experts=16)] * 2
    for trace in Threads(6).run(monkeypatch, parts, replicas):
        assert torch.equal(trace.topk_indices.long(), whole)
        assert trace.replay_mask.all()
        assert (trace.sequence_lengths, trace.token_ids.tolist()) == ((3, 1, 2), [100, 101, 102, 103, 104, 105])


def test_samples_of_one_rank_that_are_not_those_of_the_whole_raise(monkeypatch):
    whole = parts_of(4, 64)[1]
    short = whole.gather_rows(range(60)).with_samples([60])
    with pytest.raises(TraceError, match=r"sequence_lengths .*60.*64"):
        Threads(2).run(monkeypatch, [short, whole])
    equal = whole.with_samples([40, 24])
    assert [trace.sequence_lengths for trace in Threads(2).run(monkeypatch, [equal, whole])] == [(40, 24)] * 2


def test_ranks_of_a_replica_that_recorded_different_samples_raise(monkeypatch):
    """A forward failed on one of them alone: its rows would be those of other samples."""
    whole = parts_of(4, 64)[1].with_samples([40, 24])
    for other in (whole.with_samples([32, 32]), whole.gather_rows(slice(40)).with_samples([40])):
        for parts in ([whole, other], [other, whole]):
            with pytest.raises(TraceError, match="MRR107: cannot gather: rank 1 recorded"):
                Threads(2).run(monkeypatch, parts, [(0,), (0,)])


def test_stages_without_moe_layers_that_are_gathered_first_leave_the_samples_to_the_other_stages(monkeypatch):
    dense = RoutingTrace(topk_indices=torch.zeros(0, 0, TOPK, dtype=torch.int64), layer_numbers=(), num_experts=16)
    without = Threads(2).run(monkeypatch, [dense, dense], [(0,), (1,)])[0]
    routed = parts_of(4, 64)[1].with_samples([40, 24])
    for trace in Threads(2).run(monkeypatch, [routed, without], [(0, 1), (0, 1)]):
        assert trace == routed


# ---- whole sessions, on two ranks


def gather_where_a_rank_finds_no_memory():
    """For its part, and then for the rows of it that it sends; the third attempt is in order."""
    chunk, rank = Chunk(), dist.get_rank()
    with mrr.record(chunk, padding_token_ids=[]) as recording:
        chunk(tokens())
    texts = []
    for owner, name in ((type(recording), "trace"), (RoutingTrace, "gather_rows")):
        with pytest.MonkeyPatch.context() as patch:
            if rank:
                patch.setattr(owner, name, _find_no_memory)
            with pytest.raises(MemoryError if rank else TraceError) as error:
                recording.gather()
        texts.append(str(error.value))
    return texts, recording.gather().num_tokens


def _find_no_memory(*_, **__):
    raise MemoryError("injected")


def test_a_rank_that_finds_no_memory_to_gather_raises_on_all_and_all_may_repeat_it(on_ranks):
    told = "MRR422: cannot gather, because ranks [1] have no part: MemoryError: injected"
    assert on_ranks(2, gather_where_a_rank_finds_no_memory) == [([told] * 2, 16), (["injected"] * 2, 16)]


def record_on(ranks):
    chunk, rank = Chunk(), dist.get_rank()
    with mrr.record(chunk, padding_token_ids=[]) as recording:
        if rank in ranks:
            chunk(tokens()[:, rank:])
    trace = recording.gather()
    return trace.sequence_lengths, trace.token_ids.tolist()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_data_parallel_rank_without_a_forward_adds_no_sample(on_ranks, rank):
    expected = (4 - rank,) * 2, tokens()[:, rank:].flatten().tolist()
    assert on_ranks(2, record_on, [rank]) == [expected] * 2


def gather_where_a_row_came_twice():
    """Of rank 1's part, in the first of two groups; each rank alone is the second one."""
    chunk, rank = Chunk(), dist.get_rank()
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    with mrr.record(chunk) as recording:
        for i in range(1 + rank):
            recording.microbatch(ROWS)
            chunk(tokens(seed=1 + i))
    with pytest.raises(TraceError) as error:
        recording.gather(None, alone)
    return str(error.value)


def test_a_rank_whose_part_cannot_be_read_raises_on_all_ranks_that_gather(on_ranks):
    first, second = on_ranks(2, gather_where_a_row_came_twice)
    assert first.startswith("MRR422: cannot gather, because ranks [1] have no part: row 0 was routed twice")
    assert second.startswith("MRR422: row ")


@pytest.mark.parametrize(
    ("rank", "name", "row", "message"),
    [
        (4, "topk_indices", 33, "^MRR109: an earlier rank and rank 4 disagree on row 33, layer "),
        (5, "token_ids", 34, "^MRR109: rank 5 has token_ids=.* in row 34, an earlier part "),
    ],
)
def test_ranks_that_differ_raise_on_all_of_them(monkeypatch, rank, name, row, message):
    parts = parts_of(8, 64)
    parts[4] = parts[4]._with(topk_indices=parts[4].topk_indices.roll(1, 2))  # the order of experts does not count
    values = getattr(parts[rank], name).clone()
    values[row] = (values[row] + 1) % 16
    parts[rank] = parts[rank]._with(**{name: values})
    with pytest.raises(TraceError, match=message):
        Threads(8).run(monkeypatch, parts)


def test_a_rank_that_finds_no_memory_while_it_joins_still_sends_its_rows_and_all_ranks_raise(monkeypatch):
    monkeypatch.setattr(gathering, "_PIECE_BYTES", 50)
    parts, threads, add = parts_of(4, 64), Threads(4), PartJoiner.add

    def fail_on_rank_2(joiner, name, *arguments):
        if threads._here.rank == 2 and name == "rank 1":
            raise MemoryError("injected")
        add(joiner, name, *arguments)

    monkeypatch.setattr(PartJoiner, "add", fail_on_rank_2)
    errors = threads.run(monkeypatch, parts, catch=Exception)
    told = "MRR422: cannot gather, because ranks [2] have no part: MemoryError: injected"
    assert list(map(str, errors)) == [told, told, "injected", told]
