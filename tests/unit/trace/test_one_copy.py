"""A trace is checked while it is copied, once: from any array, without work space, and into memory that no caller has."""

import sys
from itertools import accumulate

import numpy as np
import pytest
import torch

from benchmarks.measure import peak_above
from megatron_router_replay.errors import TraceError
from megatron_router_replay.trace import RoutingTrace, merge_traces, routing_trace

SIZES = {"num_experts": 16, "layer_numbers": [2, 4, 5]}
IDS = np.arange(20, 28)
MASK = np.array([True] * 3 + [False] + [True] * 4)
ROUTES = np.random.default_rng(0).random((7, 3, 16)).argsort(axis=2)[:, :, :2]


def readonly(array):
    array.flags.writeable = False
    return array


def unaligned(array):
    raw = np.zeros(array.nbytes + 1, np.uint8)
    raw[1:] = np.frombuffer(array.tobytes(), np.uint8)
    return np.frombuffer(raw.data, array.dtype, offset=1).reshape(array.shape)


FORMS = {
    "uint8": lambda routes: routes.astype(np.uint8),
    "int16": lambda routes: routes.astype(np.int16),
    "int64": lambda routes: routes,
    "uint16": lambda routes: routes.astype(np.uint16),
    "uint32": lambda routes: routes.astype(np.uint32),
    "big-endian": lambda routes: routes.astype(">i4"),
    "read-only": lambda routes: readonly(routes.astype(np.uint8)),
    "unaligned": lambda routes: unaligned(routes.astype(np.int32)),
    "layers first": lambda routes: np.ascontiguousarray(routes.transpose(1, 0, 2)).transpose(1, 0, 2),
    "reversed": lambda routes: routes[::-1].copy()[::-1],
    "every second": lambda routes: np.repeat(routes, 2, axis=0)[::2],
    "tensor uint8": lambda routes: torch.tensor(routes, dtype=torch.uint8),
    "tensor int64": lambda routes: torch.tensor(routes),
    "tensor uint16": lambda routes: torch.tensor(routes).to(torch.uint16),
    "tensor, experts first": lambda routes: torch.tensor(routes).permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "tensor with steps": lambda routes: torch.tensor(routes).repeat_interleave(2, dim=1)[:, ::2],
    "tensor of inference": lambda routes: torch.inference_mode()(torch.tensor)(routes),
    "lists": lambda routes: routes.tolist(),
}


@pytest.mark.parametrize("form", FORMS)
def test_routes_of_every_form_make_the_same_trace(form):
    routes = FORMS[form](ROUTES.copy())
    trace = RoutingTrace.from_samples([IDS, IDS[:1]], [routes, routes[:1]], **SIZES, weight_version=[3, [4]])
    assert trace.topk_indices[:7].tolist() == ROUTES.tolist()
    assert (trace.topk_indices.dtype, trace.topk_indices.is_contiguous()) == (torch.uint8, True)
    assert trace.replay_mask.tolist() == [True] * 7 + [False] * 2
    # Rows 7 and 8 have no route: the ids 2 * row and 2 * row + 1, modulo 16, in every layer.
    assert trace.topk_indices[7:].tolist() == [[[14, 15]] * 3, [[0, 1]] * 3]
    assert (trace.token_ids.tolist(), trace.weight_version.tolist()) == ([*IDS, 20], [3] * 8 + [4])
    made = RoutingTrace(topk_indices=routes, **SIZES)
    assert made.topk_indices.tolist() == ROUTES.tolist()
    assert (made.topk_indices.dtype, made.replay_mask.all()) == (torch.uint8, True)


@pytest.mark.parametrize("form", [form for form in FORMS if "uint" not in form])
def test_a_value_that_no_router_chose_is_seen_in_every_form(form):
    for value, text in ((16, r"an id lies outside 0..15"), (-1, "an id lies outside"), (300, "outside")):
        if form == "read-only":
            continue
        routes = ROUTES.copy()
        routes[4, 1, 1] = value
        for make in (
            lambda given: RoutingTrace.from_samples([IDS], [given], **SIZES),
            lambda given: RoutingTrace(topk_indices=given, **SIZES),
        ):
            with pytest.raises(TraceError, match=rf"MRR103: .*row 4, layer 4 of topk_indices .*{text}"):
                make(FORMS[form](routes))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_trace_shares_no_memory_with_its_caller(as_tensor):
    """It is checked once, when it is made: a caller who reuses a buffer must not write into it."""
    form = torch.tensor if as_tensor else np.array
    arrays = {
        "ids": form(IDS.astype(np.int32)),
        "routes": form(ROUTES.astype(np.uint8)),
        "mask": form(MASK),
        "version": form(np.arange(8, dtype=np.int32)),
    }
    rows = form(np.concatenate([ROUTES, ROUTES[:1]]).astype(np.uint8))
    kept = [
        RoutingTrace.from_samples(
            [arrays["ids"]],
            [arrays["routes"]],
            **SIZES,
            replay_mask=[arrays["mask"]],
            weight_version=[arrays["version"]],
        ),
        RoutingTrace(
            topk_indices=rows,
            **SIZES,
            replay_mask=arrays["mask"],
            token_ids=arrays["ids"],
            weight_version=arrays["version"],
        ),
    ]
    kept.append(merge_traces(kept[:1]))
    expected = [trace.clone() for trace in kept]
    for array in (*arrays.values(), rows):
        array[...] = 0
    assert kept[:2] == expected[:2]
    kept[0].topk_indices.zero_()
    kept[0].token_ids.zero_()
    assert kept[2] == expected[2]


def test_only_some_samples_with_a_weight_version_raise():
    for versions in ([3, None], [None, 3]):
        with pytest.raises(TraceError, match="MRR102: 1 of 2 samples have a weight_version"):
            RoutingTrace.from_samples([IDS, IDS], [ROUTES, ROUTES], **SIZES, weight_version=versions)


def test_rows_of_minus_one_and_masks_of_many_samples():
    routes = np.concatenate([ROUTES] * 400).astype(np.int16)  # 2,800 rows, -1 in more than one block of them
    routes[::2] = -1
    routes[1] = [[-1, 3], [0, 1], [0, 1]]
    mask = np.ones(2801, bool)
    mask[1] = False
    trace = RoutingTrace.from_samples([np.arange(2801)], [routes], **SIZES, replay_mask=[mask])
    expected = np.arange(2801) % 2 == 1
    expected[1] = False
    assert trace.replay_mask.tolist() == expected.tolist()
    assert np.array_equal(trace.topk_indices[:2800].numpy()[expected[:2800]], routes[expected[:2800]])
    assert trace == RoutingTrace(
        topk_indices=np.concatenate([routes, routes[:1]]),
        **SIZES,
        replay_mask=mask,
        token_ids=np.arange(2801),
        sequence_lengths=[2801],
    )


def test_samples_are_summed_once_however_many_are_taken(monkeypatch):
    sums = []
    monkeypatch.setattr(routing_trace, "accumulate", lambda values: sums.append(1) or accumulate(values))
    trace = RoutingTrace.from_samples([IDS] * 5, [ROUTES] * 5, **SIZES)
    assert [trace[i].num_tokens for i in range(5)] == [8] * 5
    assert [each.num_tokens for each in trace] == [8] * 5
    assert (trace[1:3].num_tokens, trace[-1].num_tokens, len(sums)) == (16, 8, 1)
    assert [each.num_tokens for each in trace.with_samples([1, 39])] == [1, 39]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counts of memory are Linux's")
@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_from_samples_takes_the_memory_of_its_result_and_half_as_much_at_most(dtype):
    rows = np.concatenate([ROUTES] * 16, axis=1)  # 48 layers of top-2
    routes = [np.concatenate([rows] * 584).astype(dtype) for _ in range(100)]
    tokens = [np.arange(4089)] * 100  # 41 MB of routes: work space of a few MB, once, is no second copy
    sizes = {"num_experts": 16, "layer_numbers": range(1, 49)}
    RoutingTrace.from_samples(tokens[:1], routes[:1], **sizes)
    result = 100 * 4089 * (48 * 2 + 4 + 1)
    assert result <= peak_above(lambda: RoutingTrace.from_samples(tokens, routes, **sizes)) <= 1.5 * result
