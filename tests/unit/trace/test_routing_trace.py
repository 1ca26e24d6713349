"""RoutingTrace: what it accepts, stores and refuses."""

import copy
import pickle

import numpy as np
import pytest
import torch

from megatron_router_replay import RouterReplayError, RoutingTrace, concat_traces
from megatron_router_replay.errors import TraceError
from tests.unit.small_trace import ROUTES, make


def test_it_stores_the_routes_in_one_byte_each_and_knows_its_sizes():
    trace = make()
    assert trace.topk_indices.dtype is torch.uint8
    assert trace.topk_indices.tolist() == ROUTES
    assert (trace.num_tokens, trace.num_layers, trace.topk, trace.num_experts) == (3, 2, 2, 4)
    assert trace.layer_numbers == (2, 4)
    assert trace.replay_mask.tolist() == [True, True, True]


INTEGERS = [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64, ">i4"]
INTEGERS += [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_every_integer_dtype_of_numpy_and_torch_is_accepted_read_only_too(dtype):
    if isinstance(dtype, torch.dtype):
        routes = torch.tensor(ROUTES).to(dtype)
    else:
        routes = np.array(ROUTES, dtype=dtype)
        routes.setflags(write=False)
    assert make(routes).topk_indices.tolist() == ROUTES


def test_the_input_is_neither_changed_nor_shared():
    routes = torch.tensor(ROUTES, dtype=torch.uint8)
    mask = torch.tensor([True, False, True])
    kept, kept_mask = routes.clone(), mask.clone()
    trace = make(routes, replay_mask=mask)
    assert torch.equal(routes, kept)
    assert torch.equal(mask, kept_mask)
    ids = torch.tensor([1, 2, 3], dtype=torch.int32)
    trace = make(routes, replay_mask=mask, token_ids=ids, weight_version=ids.numpy())
    for values in (routes, mask, ids):
        values.zero_()
    assert trace.token_ids.tolist() == trace.weight_version.tolist() == [1, 2, 3]
    assert trace.topk_indices[0].tolist() == ROUTES[0]
    assert trace.replay_mask.tolist() == [True, False, True]


ANYTHING = [ROUTES[0], [[0, 0], [200, 200]], ROUTES[2]]


@pytest.mark.parametrize(
    ("routes", "mask"),
    [
        ([ROUTES[0], [[-1, -1], [-1, -1]], ROUTES[2]], None),
        (ANYTHING, [True, False, True]),
        (torch.tensor(ANYTHING, dtype=torch.uint8), [True, False, True]),
    ],
)
def test_rows_without_a_route_hold_distinct_experts_whatever_was_given(routes, mask):
    trace = make(routes, replay_mask=mask)
    assert trace.replay_mask.tolist() == [True, False, True]
    assert trace.topk_indices.tolist() == [ROUTES[0], [[2, 3], [2, 3]], ROUTES[2]]


def test_token_ids_of_all_int32_are_kept():
    assert make(token_ids=[-(2**31), 0, 2**31 - 1]).token_ids.tolist() == [-(2**31), 0, 2**31 - 1]


REFUSED = {
    "a repeated expert": (dict(routes=[[[0, 1], [2, 2]]]), "row 0, layer 4 of topk_indices is [2, 2]"),
    "all zeros": (dict(routes=np.zeros((5, 2, 2), np.uint8)), "lost data, sent as zeros"),
    "an id too large": (dict(routes=[[[0, 1], [2, 4]]]), "Is num_experts right"),
    "an id too large in uint8": (
        dict(routes=torch.tensor([[[0, 1], [2, 4]]], dtype=torch.uint8)),
        "outside 0..3",
    ),
    "300 of 8": (dict(routes=[[[0, 300], [2, 1]]], num_experts=8), "outside 0..7"),
    "a row of -1 in one layer only": (dict(routes=[[[0, 1], [-1, -1]]]), "outside 0..3"),
    "uint8 of 257 experts": (
        dict(routes=np.uint8(ROUTES), num_experts=257),
        "uint8, too narrow for the ids of 257 experts",
    ),
    "255 in int8, which is -1": (
        dict(routes=np.array([[[255]]]).astype(np.int8), layer_numbers=(1,), num_experts=256),
        "int8, too narrow for the ids of 256 experts",
    ),
    "rows of several lengths": (dict(routes=[[[0, 1], [2]]]), "topk_indices must be an array, got list"),
    "a mask of several lengths": (dict(replay_mask=[[True], [True, False]]), "replay_mask must be an array"),
    "a mask of texts": (dict(replay_mask=["a", "b", "c"]), "[3] bool, got <U1 from list"),
    "floats": (dict(routes=np.zeros((1, 2, 2))), "float64"),
    "floats of torch": (dict(routes=torch.zeros(1, 2, 2)), "got torch.float32"),
    "strings": (dict(routes=[[["a", "b"], ["c", "d"]]]), "must hold integers"),
    "two axes": (dict(routes=[[0, 1], [2, 3]]), "shape [2, 2]"),
    "another number of layers": (dict(layer_numbers=(1, 2, 3)), "names 3 layers, topk_indices has 2"),
    "experts as float": (dict(num_experts=4.0), "num_experts=4.0 must be an integer"),
    "a mask of integers": (dict(replay_mask=[1, 0, 1]), "[3] bool"),
    "a mask too short": (dict(replay_mask=[True]), "[3] bool"),
    "token ids too short": (dict(token_ids=[1, 2]), "token_ids must be [3]"),
    "token ids too large": (dict(token_ids=[1, 2, 2**31]), "token_ids lies in 1..2147483648, which int32"),
    "token ids too small": (dict(token_ids=[1, 2, -(2**31) - 1]), "token_ids lies in -2147483649..2, which int32"),
    "ids without lengths": (dict(sample_ids=("a",)), "names 1 samples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_trace_cannot_be_raises_and_says_what_was_seen(name):
    options, said = REFUSED[name]
    with pytest.raises(TraceError) as caught:
        make(**options)
    assert said in str(caught.value)
    assert isinstance(caught.value, RouterReplayError)


def test_values_that_are_proven_already_are_taken_by_their_names_only():
    trace = make(token_ids=[7, 8, 9])
    values = {name: getattr(trace, name) for name in ("topk_indices", "layer_numbers", "num_experts", "replay_mask")}
    again = RoutingTrace.from_checked(**values, token_ids=trace.token_ids)
    assert again.topk_indices is trace.topk_indices
    assert again.token_ids is trace.token_ids
    assert again.weight_version is None
    # A typo once made a trace without token ids; a missing mask one that had none.
    with pytest.raises(TypeError, match="tokens_ids"):
        RoutingTrace.from_checked(**values, tokens_ids=trace.token_ids)
    for name in values:
        with pytest.raises(TypeError, match=name):
            RoutingTrace.from_checked(**{key: value for key, value in values.items() if key != name})


def test_a_trace_is_made_by_names_and_cannot_be_changed():
    with pytest.raises(TypeError, match="positional"):
        RoutingTrace(ROUTES, (2, 4), 4)
    with pytest.raises(AttributeError):
        make().num_experts = 5
    assert not hasattr(make(), "__dict__")


FULL = dict(token_ids=[1, 2, 3], weight_version=4, sequence_lengths=(1, 2), sample_ids=("a", "b"))
UNLIKE_FULL = {
    "routes": make([ROUTES[0], ROUTES[1], [[1, 2], [0, 3]]], **FULL),
    "a mask": make(**FULL, replay_mask=[True, True, False]),
    "a row without a route": make(**FULL).without_routes([False, False, True]),
    "token ids": make(**FULL | dict(token_ids=[1, 2, 4])),
    "no token ids": make(**FULL | dict(token_ids=None)),
    "versions": make(**FULL | dict(weight_version=5)),
    "samples": make(**FULL | dict(sequence_lengths=(2, 1))),
    "names": make(**FULL | dict(sample_ids=("a", "c"))),
    "layers": make(**FULL, layer_numbers=(2, 5)),
    "experts": make(**FULL, num_experts=5),
    "fewer rows": make(**FULL).gather_rows(slice(2)),
    "no trace": 5,
}


@pytest.mark.parametrize("name", UNLIKE_FULL)
def test_a_trace_equals_another_of_the_same_values_and_no_other(name):
    assert make(**FULL) == make(**FULL)
    assert make(**FULL) != UNLIKE_FULL[name]
    assert UNLIKE_FULL[name] != make(**FULL)


def test_what_stands_in_rows_without_a_route_does_not_count_and_a_trace_has_no_hash():
    part = make(ROUTES + ROUTES, replay_mask=[True] * 4 + [False, True]).gather_rows(slice(3, None))
    assert part == make(replay_mask=[True, False, True])
    assert not torch.equal(part.topk_indices, make(replay_mask=[True, False, True]).topk_indices)
    removed = [make([*ROUTES[:2], row]).without_routes([False, False, True]) for row in (ROUTES[2], ROUTES[0])]
    assert removed[0] == removed[1] != make()
    assert make().without_routes([False] * 3) == make()
    with pytest.raises(TypeError, match="unhashable"):
        hash(part)


def test_a_trace_says_how_many_rows_have_a_route_and_that_it_has_no_token_ids():
    shape = "layers [2, 4], top-2 of 4 experts, uint8)"
    assert repr(make(token_ids=[1, 2, 3])) == f"RoutingTrace(3 tokens (3 with a route), {shape}"
    assert repr(make(replay_mask=[True, True, False])) == (
        f"RoutingTrace(3 tokens (2 with a route), without token ids, {shape}"
    )


@pytest.mark.parametrize("name", ["topk_indices", "replay_mask", "token_ids", "weight_version"])
def test_a_trace_that_was_changed_in_place_is_told_from_the_one_that_was_checked(name):
    kept = make(token_ids=[1, 2, 3], weight_version=4).without_routes([False, False, True])
    trace = kept.gather_rows(slice(None))
    part = trace.select_layers([4])
    getattr(trace, name)[0] = 1  # one expert twice in each row, where these are the ids
    for take in (
        trace.check_unchanged,
        lambda: trace.to("cpu"),
        lambda: trace.gather_rows(slice(2)),
        lambda: copy.deepcopy(trace),
        lambda: concat_traces([make(token_ids=[1, 2, 3], weight_version=4), trace]),
        lambda: kept.gather_rows(slice(2)),  # the trace of which it is a view
        lambda: part.to("cpu"),
    ):
        with pytest.raises(TraceError, match=f"^MRR110: {name} of the trace was changed in place after it was checked"):
            take()


def test_copies_of_a_trace_count_changes_anew():
    indices = torch.tensor(ROUTES)
    indices[0] = indices[1]  # before: the trace has a copy of what was made of it
    trace = make(indices)
    indices[:] = 9
    for one in (trace, copy.deepcopy(trace), pickle.loads(pickle.dumps(trace)), copy.copy(trace)):
        one.check_unchanged()
        assert one.topk_indices.tolist() == [ROUTES[1], *ROUTES[1:]]
    with torch.inference_mode():  # its tensors count nothing
        of_inference = make()
    of_inference.select_layers([2]).check_unchanged()
