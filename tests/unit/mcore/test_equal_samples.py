"""Equal samples of a rollout: one of them is used for a forward's tokens, or their routes differ and the forward raises."""

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError
from megatron_router_replay.mcore.batches.samples import unlike
from tests.unit.mcore.test_follow import DRAWN, LAYERS, A, B, alike, check, ids, trace_of
from tests.unit.mcore.tiny_chunk import EXPERTS, Chunk, random_routes


def test_equal_samples_use_the_first_and_are_counted() -> None:
    trace = trace_of([A, A])
    routes = trace.topk_indices.clone()
    routes[4:] = routes[:4]
    routes[5, 0] = routes[5, 0].flip(0)  # the same experts in another order
    assert check(trace_of([A, A], routes=routes), [A, A], [[0, 1, 2, 3]] * 2).segments_ambiguous == 2
    message = (
        r"MRR208: .*micro-batch 0, input_ids\[0, 3\], sequence 0: sample 0 and sample 1 .* different routes "
        r"\(8 of 9 decisions"
    )
    with pytest.raises(LayoutError, match=message):
        check(trace, [A], [])
    # Samples that differ later are named by their end, whatever their routes are.
    assert check(trace_of([A, B]), [B], [[4, 5, 6]]).segments_ambiguous == 0


def test_of_equal_samples_one_with_routes_is_used() -> None:
    """An aborted request, or a sample that fills a batch, may have no route where an equal one has."""
    mask = torch.tensor([False] * 4 + [True, False] * 2 + [True] * 3 + [False])
    trace = trace_of([A, A, A], routes=alike([A, A, A]).topk_indices, replay_mask=mask)
    report = check(trace, [A], [[8, 9, 10, 11]])
    assert (report.rows_replayed, report.segments_ambiguous) == (3, 1)


def test_of_equal_samples_the_one_that_lost_fewer_routes_is_used_also_for_a_part_of_it() -> None:
    trace = trace_of([A, B, A], routes=alike([A, B, A]).topk_indices)
    first_lost = trace.replay_mask & torch.tensor([True, False, False, True] + [True] * 7)
    for mask, rows in ((first_lost, [7, 8, 9, 10]), (first_lost.flip(0) & trace.replay_mask, [0, 1, 2, 3])):
        of_lost = trace_of([A, B, A], routes=trace.topk_indices, replay_mask=mask)
        for tokens in (A, A[:3]):
            check(of_lost, [tokens], [rows[: len(tokens)]])


def test_equal_samples_of_other_weights_with_like_routes_are_one() -> None:
    """Asynchronous rollouts of a prompt in two steps: short answers are often equal."""
    steps = [trace_of([A], weight_version=version) for version in (3, 4)]
    for tokens in (A, A[:2]):
        assert check(mrr.concat_traces(steps), [tokens], [[0, 1, 2, 3][: len(tokens)]]).segments_ambiguous == 1
    with pytest.raises(LayoutError, match="MRR208"):
        check(mrr.concat_traces([steps[0], trace_of([A], seed=9, weight_version=4)]), [A], [])


def test_routes_of_equal_samples_are_compared_to_their_last_token() -> None:
    one = random_routes(150, len(LAYERS), 3)
    other = torch.cat([one[:128], (one[128:] + 1) % EXPERTS])
    trace = trace_of([list(range(150))] * 2, routes=torch.cat([one, other]))
    # Tokens 128 to 148 in three layers; the last token has no route.
    assert unlike(trace, 0, 150, 150) == "have different routes (63 of 63 decisions from position 128 on)"


def test_equal_samples_are_compared_again_where_a_forward_has_more_of_their_tokens() -> None:
    tokens, one = [number % 32 for number in range(150)], random_routes(150, len(LAYERS), 3)
    trace = trace_of([tokens] * 2, routes=torch.cat([one, torch.cat([one[:128], (one[128:] + 1) % EXPERTS])]))
    chunk = Chunk()
    with pytest.raises(LayoutError, match="MRR208"), mrr.replay(chunk, trace, **DRAWN):
        chunk(ids(tokens[:20]), 0)
        chunk(ids(tokens[:149]), 1)  # neither is a whole sample


def test_equal_samples_with_other_routes_raise_again_where_a_forward_is_repeated() -> None:
    chunk, trace = Chunk(), trace_of([A, A])
    with pytest.raises(LayoutError, match="MRR208"), mrr.replay(chunk, trace, **DRAWN):
        with pytest.raises(LayoutError, match="MRR208"):
            chunk(ids(A), 0)
        chunk(ids(A), 0)


@pytest.mark.parametrize(("num_different", "text"), [(4, ""), (5, "different routes (5 of 6 decisions")])
def test_a_few_decisions_that_differ_may_be_noise(num_different: int, text: str) -> None:
    one = random_routes(3, len(LAYERS), 3)
    other = one.clone().flatten(0, 1)
    other[:num_different] = (other[:num_different] + 1) % EXPERTS
    trace = trace_of([A[:3]] * 2, routes=torch.cat([one, other.view_as(one)]))
    found = unlike(trace, 0, 3, 3)  # in two rows, for the last one has no route
    assert text in found
    assert bool(text) == bool(found)
