"""Samples with one prompt have its routes: those of another sample are told; noise and other inputs are not taken for it."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from megatron_router_replay import RoutingTrace, concat_traces, engines
from megatron_router_replay.errors import PayloadError
from megatron_router_replay.siblings import Sibling, check_siblings, warn_without_ids
from megatron_router_replay.trainers import take_routes
from tests.unit.engines.engine_payloads import routes, tokens

P, L = 12, 6
MODEL = engines.ModelRoutingInfo(num_layers=3, moe_layer_numbers=(1, 2, 3), num_experts=16, topk=2)


def sibling(name, prompt, own, *, seed, version=None, length=20, header=0):
    """A sample of `prompt` (its number); `own`: of its output. The first `header` tokens are those of every prompt."""
    ids = tokens(header, seed=99) + tokens(P - header, seed=prompt) + tokens(length - P, seed=50 + own)
    rows = routes(length, L, num_experts=16, topk=2, seed=seed)
    rows[:P] = routes(P, L, num_experts=16, topk=2, seed=1000 + prompt)
    rows[:header] = routes(header, L, num_experts=16, topk=2, seed=999)
    return Sibling(
        name=name,
        token_ids=np.array(ids),
        routed=np.arange(length) < length - 1,
        weight_version=None if version is None else np.full(length, version),
        routes=rows.__getitem__,
    )


def with_routes_of(a, b):
    return Sibling(
        name=a.name, token_ids=a.token_ids, routed=a.routed, weight_version=a.weight_version, routes=b.routes
    )


def group(prompts, **options):
    return [sibling(f"sample {i}", prompt, i, seed=i, **options) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("header", [0, 8])
def test_two_samples_that_changed_places_are_named(header):
    samples = group([1, 1, 1, 2, 2, 2], header=header)
    check_siblings(samples, source="E")
    swapped = [*samples]
    swapped[1], swapped[4] = with_routes_of(samples[1], samples[4]), with_routes_of(samples[4], samples[1])
    with pytest.raises(
        PayloadError, match=r"^MRR314: E: sample \d and sample \d begin with the same 12 tokens.* only \d% agree"
    ):
        check_siblings(swapped, source="E")


def test_tiled_routes_beside_interleaved_tokens_are_told():
    samples = group([1, 1, 2, 2])
    tiled = [with_routes_of(samples[i], samples[j]) for i, j in enumerate([0, 2, 1, 3])]
    with pytest.raises(PayloadError, match=r"sample 0 and sample 1 .*n choices tiled"):
        check_siblings(tiled, source="E")


@pytest.mark.parametrize(("disagreeing", "is_refused"), [(2, False), (5, False), (6, False), (9, True), (12, True)])
def test_noise_is_believed_and_half_of_the_decisions_is_not(disagreeing, is_refused):
    """Every second layer of the last rows, or all of them, differ."""
    samples = group([1, 1])
    rows = samples[1].routes(np.arange(20)).copy()
    if is_refused:
        rows[P - disagreeing : P] = routes(disagreeing, L, num_experts=16, topk=2, seed=7)
    else:
        rows[P - disagreeing : P, ::3] = routes(disagreeing, 2, num_experts=16, topk=2, seed=7)
    noisy = Sibling(
        name="noisy",
        token_ids=samples[1].token_ids,
        routed=samples[1].routed,
        weight_version=None,
        routes=rows.__getitem__,
    )
    if not is_refused:
        check_siblings([samples[0], noisy], source="E")
        return
    with pytest.raises(PayloadError, match=f"decisions on tokens {P - disagreeing}..11"):
        check_siblings([samples[0], noisy], source="E")


def traces_of(routes_of, **options):
    """A trace a sample, of prompts 1, 1 and 2; the routes of sample i are those of sample routes_of[i]."""
    samples = group([1, 1, 2])
    for sample, other in zip(samples, routes_of):
        yield RoutingTrace(
            topk_indices=samples[other].routes(np.arange(20)),
            layer_numbers=range(1, L + 1),
            num_experts=16,
            replay_mask=sample.routed,
            token_ids=sample.token_ids,
            **options,
        )


def test_traces_that_are_joined_are_compared_as_samples():
    right, wrong = list(traces_of([0, 1, 2])), list(traces_of([0, 2, 1]))
    assert concat_traces(right).sequence_lengths is None
    numbered = [list(traces_of(order, sequence_lengths=[20])) for order in ([0, 1, 2], [0, 2, 1])]
    assert concat_traces(numbered[0]).sequence_lengths == (20, 20, 20)
    for samples in (wrong, numbered[1], [concat_traces(numbered[1][:1]), *numbered[1][1:]]):
        with pytest.raises(
            PayloadError, match=r"^MRR314: concat_traces: sample 0 and sample 1 begin with the same 12 tokens"
        ):
            concat_traces(samples)
        assert concat_traces(samples, allow_unlike_prompts=True).num_tokens == 60
    versions = [sample for i in (3, 4) for sample in traces_of([0, 2, 1], weight_version=i)]
    concat_traces([versions[0], versions[4]])  # one prompt, routes of another, and other weights
    with pytest.raises(PayloadError):
        concat_traces([versions[0], versions[1]])


def test_the_order_of_experts_does_not_matter():
    a, b = group([1, 1])
    rows = b.routes(np.arange(20))[:, :, ::-1]
    flipped = Sibling(name="b", token_ids=b.token_ids, routed=b.routed, weight_version=None, routes=rows.__getitem__)
    check_siblings([a, flipped], source="E")


def test_different_weights_and_rows_without_a_route_are_not_compared():
    samples = group([1, 2])
    exchanged = with_routes_of(samples[0], samples[1])
    for a, b in (
        (sibling("a", 1, 0, seed=0, version=3), with_routes_of(sibling("b", 1, 0, seed=0, version=4), samples[1])),
        (samples[0], Sibling(name="b", token_ids=exchanged.token_ids, routed=np.arange(20) >= 17, weight_version=None,
                             routes=samples[1].routes)),
    ):  # fmt: skip
        check_siblings([a, b], source="E")
    with pytest.raises(PayloadError):
        check_siblings([samples[0], exchanged], source="E")


def test_behind_the_placeholders_of_an_image_nothing_is_compared():
    ids = np.array([5, 6, *[9] * 16, 7, 8, 1, 2])
    rows = [routes(22, L, num_experts=16, topk=2, seed=seed) for seed in (1, 2)]
    rows[1][:2] = rows[0][:2]
    pair = [
        Sibling(name=f"{i}", token_ids=ids, routed=np.ones(22, bool), weight_version=None, routes=rows[i].__getitem__)
        for i in (0, 1)
    ]
    check_siblings(pair, source="E")
    for image in (1, 9):  # first in the prompt
        front = Sibling(name="f", token_ids=np.array([image] * 16 + [7, 8, 1, 2, 3, 4]), routed=np.ones(22, bool),
                        weight_version=None, routes=routes(22, L, num_experts=16, topk=2, seed=9).__getitem__)  # fmt: skip
        check_siblings([front, replace(front, routes=rows[0].__getitem__)], source="E")
    ids[10] = 3  # 8 and 7 equal ids: text
    with pytest.raises(PayloadError):
        check_siblings(pair, source="E")


def test_few_decisions_say_nothing():
    """Three layers of six tokens, 18 decisions: 2.3 bits each at most."""
    ids = np.arange(6)
    pair = [
        Sibling(name="x", token_ids=ids, routed=np.ones(6, bool), weight_version=None,
                routes=routes(6, 3, num_experts=64, topk=2, seed=seed).__getitem__)
        for seed in (1, 2)
    ]  # fmt: skip
    check_siblings(pair, source="E")
    check_siblings([], source="E")


def test_a_trace_without_ids_is_warned_of_once(caplog):
    warn_without_ids.cache_clear()
    rows = routes(4, 3, num_experts=16, topk=2)
    for _ in range(2):
        engines.vllm.decode(rows, model=MODEL, token_ids=range(5))
        take_routes([rows], MODEL, tokens=[np.arange(5)])
    assert "without token ids" not in caplog.text
    for _ in range(2):
        engines.vllm.decode(rows, model=MODEL, num_tokens=5)
        take_routes([rows], MODEL, lengths=[5])
    assert caplog.text.count("a trace without token ids: nothing proves") == 1


@pytest.mark.parametrize(("num_rows", "is_refused"), [(23, False), (24, True)])
def test_half_of_the_decisions_are_refused_from_40_bits_on(num_rows, is_refused):
    """0.322 bits a decision: 23 rows of 6 layers have 44.4 of the 44.5 that it takes, 24 have 46.4."""
    rows = [routes(num_rows, L, num_experts=16, topk=2, seed=seed) for seed in (1, 2)]
    rows[1][:, :3] = rows[0][:, :3]
    rows[1][:, 3:] = (rows[0][:, 3:] + 1) % 16
    pair = [
        Sibling(
            name=str(i),
            token_ids=np.arange(1, num_rows + 1),
            routed=np.ones(num_rows, bool),
            weight_version=None if i else np.full(num_rows, 3),  # of one alone the version is known: they are compared
            routes=rows[i].__getitem__,
        )
        for i in (0, 1)
    ]
    message = rf"{6 * num_rows} decisions on tokens 0\.\.{num_rows - 1} only 50% agree"
    with pytest.raises(PayloadError, match=message) if is_refused else contextlib.nullcontext():
        check_siblings(pair, source="E")
