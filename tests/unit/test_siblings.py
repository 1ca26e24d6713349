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

P, L, LENGTH = 12, 6, 20
"""Tokens of a prompt, layers, tokens of a sample."""
MODEL = engines.ModelRoutingInfo(num_layers=3, moe_layer_numbers=(1, 2, 3), num_experts=16, topk=2)


def sample(name, ids, rows, *, routed=None, version=None):
    """A sample of these tokens and routes; where nothing else is said every token has a route."""
    return Sibling(
        name=name,
        token_ids=np.asarray(ids),
        routed=np.ones(len(ids), bool) if routed is None else routed,
        weight_version=None if version is None else np.full(len(ids), version),
        routes=rows.__getitem__,
    )


def random_rows(num_tokens, seed):
    return routes(num_tokens, L, num_experts=16, topk=2, seed=seed)


def group(prompts, *, header=0, version=None):
    """A sample for each prompt (its number) and an output of its own; the first `header` tokens are those of every prompt."""
    result = []
    for i, prompt in enumerate(prompts):
        ids = tokens(header, seed=99) + tokens(P - header, seed=prompt) + tokens(LENGTH - P, seed=50 + i)
        rows = random_rows(LENGTH, i)
        rows[:P] = random_rows(P, 1000 + prompt)
        rows[:header] = random_rows(header, 999)
        result.append(sample(f"sample {i}", ids, rows, routed=np.arange(LENGTH) < LENGTH - 1, version=version))
    return result


def with_rows(one, rows):
    return replace(one, routes=rows.__getitem__)


def with_routes_of(samples, order):
    return [replace(one, routes=samples[other].routes) for one, other in zip(samples, order)]


def check(*samples):
    check_siblings(samples, source="E")


@pytest.mark.parametrize("header", [0, 8])
def test_two_samples_that_changed_places_are_named(header):
    samples = group([1, 1, 1, 2, 2, 2], header=header)
    check(*samples)
    message = r"^MRR314: E: sample \d and sample \d begin with the same 12 tokens.* only \d% agree"
    with pytest.raises(PayloadError, match=message):
        check(*with_routes_of(samples, [0, 4, 2, 3, 1, 5]))


def test_tiled_routes_beside_interleaved_tokens_are_told():
    with pytest.raises(PayloadError, match=r"sample 0 and sample 1 .*n choices tiled"):
        check(*with_routes_of(group([1, 1, 2, 2]), [0, 2, 1, 3]))


@pytest.mark.parametrize(("disagreeing", "is_refused"), [(2, False), (5, False), (6, False), (9, True), (12, True)])
def test_noise_is_believed_and_half_of_the_decisions_is_not(disagreeing, is_refused):
    """Every second layer of the last rows, or all of them, differ."""
    one, other = group([1, 1])
    rows = other.routes(np.arange(LENGTH)).copy()
    layers = slice(None) if is_refused else slice(None, None, 3)
    rows[P - disagreeing : P, layers] = random_rows(disagreeing, 7)[:, layers]
    refusal = pytest.raises(PayloadError, match=f"decisions on tokens {P - disagreeing}..11")
    with refusal if is_refused else contextlib.nullcontext():
        check(one, with_rows(other, rows))


def traces_of(routes_of, **options):
    """A trace a sample, of prompts 1, 1 and 2; the routes of sample i are those of sample routes_of[i]."""
    return [
        RoutingTrace(
            topk_indices=one.routes(np.arange(LENGTH)),
            layer_numbers=range(1, L + 1),
            num_experts=16,
            replay_mask=one.routed,
            token_ids=one.token_ids,
            **options,
        )
        for one in with_routes_of(group([1, 1, 2]), routes_of)
    ]


def test_traces_that_are_joined_are_compared_as_samples():
    right, wrong = traces_of([0, 1, 2]), traces_of([0, 2, 1])
    assert concat_traces(right).sequence_lengths is None
    numbered, exchanged = (traces_of(order, sequence_lengths=[LENGTH]) for order in ([0, 1, 2], [0, 2, 1]))
    assert concat_traces(numbered).sequence_lengths == (20, 20, 20)
    message = r"^MRR314: concat_traces: sample 0 and sample 1 begin with the same 12 tokens"
    for samples in (wrong, exchanged, [concat_traces(exchanged[:1]), *exchanged[1:]]):
        with pytest.raises(PayloadError, match=message):
            concat_traces(samples)
        assert concat_traces(samples, allow_unlike_prompts=True).num_tokens == 60
    old, new = (traces_of([0, 2, 1], weight_version=version) for version in (3, 4))
    concat_traces([old[0], new[1]])  # one prompt, routes of another, and other weights
    with pytest.raises(PayloadError):
        concat_traces(old[:2])


def test_the_order_of_experts_does_not_matter():
    one, other = group([1, 1])
    check(one, with_rows(other, other.routes(np.arange(LENGTH))[:, :, ::-1]))


def test_different_weights_and_rows_without_a_route_are_not_compared():
    (one,) = group([1])
    other = with_rows(one, random_rows(LENGTH, 77))
    check(*(replace(each, weight_version=np.full(LENGTH, 3 + i)) for i, each in enumerate((one, other))))
    check(one, replace(other, routed=np.arange(LENGTH) >= LENGTH - 3))
    with pytest.raises(PayloadError):
        check(one, other)


def test_behind_the_placeholders_of_an_image_nothing_is_compared():
    ids = np.array([5, 6, *[9] * 16, 7, 8, 1, 2])
    rows = [random_rows(22, seed) for seed in (1, 2)]
    rows[1][:2] = rows[0][:2]
    pair = [sample(str(i), ids, rows[i]) for i in (0, 1)]
    check(*pair)
    for image in (1, 9):  # first in the prompt
        in_front = [image] * 16 + [7, 8, 1, 2, 3, 4]
        check(sample("f", in_front, random_rows(22, 9)), sample("f", in_front, rows[0]))
    ids[10] = 3  # 8 and 7 equal ids: text
    with pytest.raises(PayloadError):
        check(*pair)


def test_few_decisions_say_nothing():
    """Three layers of six tokens, 18 decisions: 2.3 bits each at most."""
    check(*(sample("x", np.arange(6), routes(6, 3, num_experts=64, topk=2, seed=seed)) for seed in (1, 2)))
    check()


@pytest.mark.parametrize(("num_rows", "is_refused"), [(23, False), (24, True)])
def test_half_of_the_decisions_are_refused_from_40_bits_on(num_rows, is_refused):
    """0.322 bits a decision: 23 rows of 6 layers have 44.4 of the 44.5 that it takes, 24 have 46.4."""
    rows = [random_rows(num_rows, seed) for seed in (1, 2)]
    rows[1][:, :3] = rows[0][:, :3]
    rows[1][:, 3:] = (rows[0][:, 3:] + 1) % 16
    # Of one alone the version is known: they are compared.
    pair = [sample(str(i), np.arange(1, num_rows + 1), rows[i], version=(3, None)[i]) for i in (0, 1)]
    message = rf"{6 * num_rows} decisions on tokens 0\.\.{num_rows - 1} only 50% agree"
    with pytest.raises(PayloadError, match=message) if is_refused else contextlib.nullcontext():
        check(*pair)


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
