"""What is taken out of a RoutingTrace: layers, rows, samples, a part of its routes; and traces joined to one."""

import numpy as np
import pytest
import torch

from megatron_router_replay import RoutingTrace, concat_traces, merge_traces
from megatron_router_replay.errors import TraceError
from tests.unit.small_trace import ROUTES, make


def test_layers_are_taken_by_their_number():
    trace = make()
    assert trace.layer(4).tolist() == [[2, 3], [1, 2], [0, 3]]
    chosen = trace.select_layers([4])
    assert (chosen.layer_numbers, chosen.topk_indices.tolist()) == ((4,), [[[2, 3]], [[1, 2]], [[0, 3]]])
    assert chosen.topk_indices.data_ptr() == trace.topk_indices[:, 1:].data_ptr()  # a view
    assert trace.select_layers([]).num_layers == 0
    assert trace.select_layers([4, 4]).layer_numbers == (4,)
    numbers = trace.select_layers(torch.tensor([4, 4])).layer_numbers
    assert (numbers, [type(number) for number in numbers]) == ((4,), [int])
    with pytest.raises(TraceError, match=r"layer_number=4\.0 must be an integer"):
        trace.select_layers([4.0])
    with pytest.raises(TraceError, match=r"no layer_number 3; it has \[2, 4\]"):
        trace.layer(3)


def test_rows_are_sliced_as_views_and_gathered_as_copies():
    trace = make(token_ids=[7, 8, 9])
    part = trace.gather_rows(slice(1, 3))
    assert (part.topk_indices.tolist(), part.token_ids.tolist()) == (ROUTES[1:], [8, 9])
    assert part.topk_indices.data_ptr() == trace.topk_indices[1:].data_ptr()
    picked = trace.gather_rows([2, 0, 2])
    assert picked.topk_indices.tolist() == [ROUTES[2], ROUTES[0], ROUTES[2]]
    assert picked.token_ids.tolist() == [9, 7, 9]
    for rows in ([3], [-1]):
        with pytest.raises(TraceError, match=r"of a trace of 3 tokens"):
            trace.gather_rows(rows)
    with pytest.raises(TraceError, match=r"rows must be one-dimensional, got shape \[1, 2\]"):
        trace.gather_rows([[0, 1]])
    assert trace.gather_rows([]).num_tokens == 0


def test_traces_concatenate_with_their_metadata():
    one = make(token_ids=[1, 2, 3], sequence_lengths=(3,), sample_ids=("x",), weight_version=4)
    other = make(
        ROUTES[:1], token_ids=[4], sequence_lengths=(1,), sample_ids=("y",), weight_version=5, replay_mask=[False]
    )
    both = concat_traces([one, other])
    assert both.topk_indices.tolist()[:3] == ROUTES
    assert both.replay_mask.tolist() == [True, True, True, False]
    assert both.token_ids.tolist() == [1, 2, 3, 4]
    assert (both.sequence_lengths, both.sample_ids) == ((3, 1), ("x", "y"))
    assert both.weight_version.tolist() == [4, 4, 4, 5]


def test_traces_of_different_models_or_metadata_do_not_concatenate():
    with pytest.raises(TraceError, match="layer_numbers"):
        concat_traces([make(), make(layer_numbers=(1, 2))])
    with pytest.raises(TraceError, match="num_experts"):
        concat_traces([make(), make(num_experts=8)])
    with pytest.raises(TraceError, match="trace 0 has token_ids, trace 1 has none"):
        concat_traces([make(token_ids=[1, 2, 3]), make(ROUTES[:1])])
    with pytest.raises(TraceError, match="at least one"):
        concat_traces([])


def test_an_empty_batch_adds_no_sample_and_takes_none_of_the_metadata_away():
    # What a decoder returns for a list of no replies: lengths () and nothing else.
    empty = make(np.zeros((0, 2, 2), np.int32), sequence_lengths=())
    batch = make(token_ids=[1, 2, 3], sequence_lengths=(1, 2), sample_ids=("a", "b"), weight_version=4)
    for traces in ([empty, batch], [batch, empty], [empty, batch, empty]):
        joined = concat_traces(traces)
        assert joined.topk_indices.tolist() == ROUTES
        assert joined.token_ids.tolist() == [1, 2, 3]
        assert (joined.sequence_lengths, joined.sample_ids) == ((1, 2), ("a", "b"))
        assert joined.weight_version.tolist() == [4, 4, 4]
        assert [sample.token_ids.tolist() for sample in joined.samples()] == [[1], [2, 3]]
    twice = concat_traces([empty, empty])
    assert (twice.num_tokens, twice.sequence_lengths, twice.sample_ids) == (0, (), None)
    # Nor does it ask of others for metadata that it has of no rows.
    named = make(np.zeros((0, 2, 2), np.int32), sequence_lengths=(), sample_ids=(), token_ids=[], weight_version=4)
    plain = make(sequence_lengths=(3,))
    assert concat_traces([named, plain]) == concat_traces([plain, named]) == plain


def test_a_trace_without_routes_has_no_weight_version_that_others_could_miss():
    aborted, done = make(ROUTES[:1], replay_mask=[False]), make(weight_version=4)
    assert concat_traces([aborted, done, aborted]).weight_version.tolist() == [-1, 4, 4, 4, -1]
    with pytest.raises(TraceError, match="trace 0 has weight_version, trace 1 has none"):
        concat_traces([done, make(ROUTES[:1])])


def test_a_sample_of_no_tokens_stays_a_sample():
    aborted = make(np.zeros((0, 2, 2), np.int32), sequence_lengths=(0,), sample_ids=("b",))
    one = make(ROUTES[:1], sequence_lengths=(1,), sample_ids=("a",))
    joined = concat_traces([one, aborted, one])
    assert (joined.sequence_lengths, joined.sample_ids) == ((1, 0, 1), ("a", "b", "a"))
    # Without a name among named ones it cannot be told which sample it is.
    nameless = make(np.zeros((0, 2, 2), np.int32), sequence_lengths=(0,))
    with pytest.raises(TraceError, match="trace 0 has sample_ids, trace 1 has none"):
        concat_traces([one, nameless])


def test_rows_without_routes_are_those_of_the_mask_and_no_row_gets_its_route_back():
    mask, trace = torch.tensor([False, False, True]), make(token_ids=[7, 8, 9])
    part = trace.without_routes(mask)
    mask.fill_(True)
    assert (part.replay_mask.tolist(), trace.replay_mask.tolist()) == ([True, True, False], [True] * 3)
    assert part.without_routes([True, False, False]).replay_mask.tolist() == [False, True, False]
    assert torch.equal(part.topk_indices, trace.topk_indices)
    assert part.token_ids.tolist() == [7, 8, 9]
    for wrong in ([True], [1, 0, 1], [[True, True, True]], torch.tensor([0, 1, 2])):
        with pytest.raises(TraceError, match=r"the mask must be \[3\] bool"):
            make().without_routes(wrong)


def test_layers_get_other_numbers_and_stay_in_the_order_of_their_numbers():
    trace = make(token_ids=[7, 8, 9])
    assert trace.renumber({2: 1, 4: 2}).layer_numbers == (1, 2)
    same = trace.renumber({2: 3, 4: 9, 77: 1})  # a mapping of the whole model, a trace of a part
    assert (same.layer_numbers, same.topk_indices.tolist()) == ((3, 9), ROUTES)
    assert same.token_ids.tolist() == [7, 8, 9]
    swapped = trace.renumber({2: 4, 4: 2})
    assert swapped.layer_numbers == (2, 4)
    assert torch.equal(swapped.layer(4), trace.layer(2))
    assert torch.equal(swapped.layer(2), trace.layer(4))


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({2: 1}, r"has no number for layer 4"),
        ({2: 5, 4: 5}, r"must increase from 1 or more, got \[5, 5\]"),
        ({2: 1.5, 4: 2}, "must be an integer"),
    ],
)
def test_numbers_that_would_lose_a_layer_are_refused(numbers, message):
    with pytest.raises(TraceError, match=message):
        make().renumber(numbers)


def test_samples_keep_their_names_where_they_have_any():
    named = make(sequence_lengths=(1, 2), sample_ids=("x", "y"))
    assert [(sample.sequence_lengths, sample.sample_ids) for sample in named.samples()] == [
        ((1,), ("x",)),
        ((2,), ("y",)),
    ]
    assert [sample.sample_ids for sample in make(sequence_lengths=(1, 2)).samples()] == [None, None]


def test_all_tensors_go_to_another_device():
    moved = make(token_ids=[7, 8, 9], weight_version=1).to("meta")
    tensors = (moved.topk_indices, moved.replay_mask, moved.token_ids, moved.weight_version)
    assert [tensor.device.type for tensor in tensors] == ["meta"] * 4
    assert make().to("meta").token_ids is None


def of_six_tokens(**options):
    """Six tokens in one layer: row i is of token 10 + i, and its experts are i and i + 1 of 7."""
    return RoutingTrace(
        topk_indices=[[[i, i + 1]] for i in range(6)],
        layer_numbers=[3],
        num_experts=7,
        token_ids=[10, 11, 12, 13, 14, 15],
        **options,
    )


SAMPLES = [[10, 11], [], [12, 13, 14], [15]]


@pytest.mark.parametrize(
    "index",
    [*range(-4, 4), *(slice(a, b, c) for a in (None, -3, 0, 1, 9) for b in (None, -1, 2, 9) for c in (None, 2, -1))],
)
def test_a_trace_is_a_list_of_its_samples(index):
    trace = of_six_tokens(sequence_lengths=[2, 0, 3, 1], sample_ids=["a", "none", "b", "c"], weight_version=5)
    taken = trace[index]
    expected = SAMPLES[index] if isinstance(index, slice) else [SAMPLES[index]]
    names = ["a", "none", "b", "c"][index]
    assert [sample.token_ids.tolist() for sample in taken] == expected
    assert taken.sample_ids == tuple([names] if isinstance(names, str) else names)
    assert taken.topk_indices.tolist() == [[[token - 10, token - 9]] for sample in expected for token in sample]
    assert taken.weight_version.tolist() == [5] * sum(map(len, expected))
    assert len(taken) == len(expected)
    assert [sample.token_ids.tolist() for sample in reversed(taken)] == expected[::-1]


def test_neighbouring_samples_are_a_view():
    trace = of_six_tokens(sequence_lengths=[2, 3, 1])
    assert trace[1:].topk_indices.data_ptr() == trace.topk_indices[2:].data_ptr()
    assert trace[1].sample_ids is None


def test_no_sample_and_no_index_of_one_raise():
    trace = of_six_tokens(sequence_lengths=[2, 4])
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"MRR106: the trace has 2 samples, and no sample {index}"):
            trace[index]
    for index in ([0, 1], 1.5, "a", True):
        with pytest.raises(TraceError, match=r"index=.* must be an integer"):
            trace[index]


@pytest.mark.parametrize("take", [list, len, lambda trace: trace[0], lambda trace: trace[:2], lambda t: t.samples()])
def test_a_trace_that_does_not_know_its_samples_says_so_and_has_rows(take):
    with pytest.raises(TraceError, match=r"MRR105: .*with_samples.*num_tokens counts its rows, trace\.gather_rows"):
        take(of_six_tokens())


def test_one_trace_where_parts_are_meant_is_not_taken_for_its_samples():
    with pytest.raises(TraceError):
        merge_traces(of_six_tokens(sequence_lengths=[3, 3]))
