"""Random replies: legal ones decode to their own routes, damaged ones raise, any other value does one or the other.

A case gets no more address space than 512 MiB beyond that of the process.
"""

import copy
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_router_replay import engines
from megatron_router_replay.errors import PayloadError, RouterReplayError
from tests.unit.engines.engine_payloads import FORMS, int32_base64, npy_base64, routes, tensor, tokens, with_dense

L, E, K, MOE = 4, 300, 3, [0, 2, 3]
MODEL = engines.ModelRoutingInfo(num_layers=L, moe_layer_numbers=(1, 3, 4), num_experts=E, topk=K)
FULL = with_dense(routes(3, 3, num_experts=E, topk=K), L, MOE)
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def bounded_memory():
    engines.vllm.decode(FULL, model=MODEL, num_tokens=4)  # loads torch
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (512 << 20), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def changed(rows, at, value):
    rows = rows.copy()
    rows[at % len(rows), MOE[at % 3]] = value
    return rows


ROW_DAMAGE = {
    "row lost": lambda rows, at: np.delete(rows, at % len(rows), axis=0),
    "row doubled": lambda rows, at: np.insert(rows, at % len(rows), rows[at % len(rows)], axis=0),
    "layer lost": lambda rows, at: rows[:, 1:],
    "layers swapped": lambda rows, at: rows[:, [1, 0, 2, 3]],  # the dense one's zeros are then a route
    "expert beyond the last": lambda rows, at: changed(rows, at, [0, 1, E]),
    "expert twice": lambda rows, at: changed(rows, at, [5, 5, 1]),
    "zeros": lambda rows, at: changed(rows, at, 0),
}
FORM = st.sampled_from([form for form in FORMS if "array" not in form])
SIZES = st.tuples(st.integers(1, 9), st.integers(2, 9), st.integers(0, 2**20))


def one(form, sizes, damage=None):
    """Return the routes, ids and reply of a sample; Megatron's arrays have the MoE layers alone."""
    num_prompt, num_output, seed = sizes
    prompt, output = tokens(num_prompt, seed=seed), tokens(num_output, seed=seed + 1)
    rows = with_dense(routes(num_prompt + num_output - 1, 3, num_experts=E, topk=K, seed=seed), L, MOE)
    sent = ROW_DAMAGE.get(damage, lambda rows, at: rows)(rows, seed).astype(np.uint16)
    compact = form.startswith("megatron") and damage not in ("layer lost", "layers swapped")
    return rows[:, MOE], prompt + output, FORMS[form](sent[:, MOE] if compact else sent, prompt, output)


@given(form=FORM, sizes=SIZES, damage=st.sampled_from([None, "id lost", "id doubled", *ROW_DAMAGE]))
@settings(max_examples=400, deadline=2000)
def test_a_legal_reply_decodes_to_its_own_routes_and_a_damaged_one_is_refused(form, sizes, damage):
    expected, ids, reply = one(form, sizes, damage)
    decode = getattr(engines, form.split()[0]).decode
    if damage is None:
        trace = decode(reply, model=MODEL, token_ids=ids)
        assert np.array_equal(trace.topk_indices[:-1].numpy(), expected)
        assert trace.replay_mask.tolist() == [True] * len(expected) + [False]
        assert trace.token_ids.tolist() == ids
        return
    with pytest.raises(PayloadError):
        decode(reply, model=MODEL, token_ids={"id lost": ids[1:], "id doubled": [ids[0], *ids]}.get(damage, ids))


NAMES = (
    "choices outputs routed_experts prompt_routed_experts token_ids meta_info sglext prompt_token_ids usage id index x "
    "finish_reason output_ids moe_topk_indices routing_indices weight_versions metadata message data shape dtype start "
    "prompt_tokens completion_tokens total_tokens routed_experts_start_len error detail object type length"
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-9, 999), st.sampled_from([2**40, -(2**70)]), st.floats(), st.text(), st.binary(),
    st.just(0).map(lambda _: 10**9000),  # which Python refuses to write out
    st.sampled_from([npy_base64(FULL.astype(np.uint16)), int32_base64(FULL), FULL.tolist(), FULL[:, MOE].tolist()]),
    st.sampled_from([tensor(FULL), [1, 2, 3, 4], ["ndarray", {"data": [], "dtype": ""}]]),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES.split()), inner, max_size=4),
    max_leaves=8,
)


def places(tree):
    """Yield every (container, key) of a reply that was parsed from JSON."""
    for key, value in list(
        tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    ):
        yield tree, key
        yield from places(value)


@given(form=FORM, sizes=SIZES, value=VALUES, ids=VALUES, data=st.data())
@settings(max_examples=1000, deadline=2000)
def test_any_value_is_a_trace_of_legal_routes_or_refused(form, sizes, value, ids, data):
    """The value is a whole result, or stands anywhere in a legal reply, whose own routes are then the only ones."""
    expected, own_ids, reply = one(form, sizes)
    decoder, reply, key = getattr(engines, form.split()[0]), copy.deepcopy(reply), None
    if (changes := list(places(reply))) and data.draw(st.booleans()):
        container, key = data.draw(st.sampled_from(changes))
        container[key], value = value, reply
    given_ids = {} if ids is None else {"token_ids": data.draw(st.sampled_from([ids, own_ids, None]))}
    try:
        trace = (decoder.decode if given_ids else decoder.decode_batch)(value, model=MODEL, **given_ids)
    except RouterReplayError:
        return
    rows = np.sort(trace.topk_indices.numpy(), axis=2)
    assert rows.min(initial=0) >= 0
    assert rows.max(initial=0) < E
    assert (rows[:, :, 1:] != rows[:, :, :-1]).all()
    assert sum(trace.sequence_lengths) == len(trace) == len(trace.replay_mask)
    if isinstance(key, str) and "rout" not in key and trace.replay_mask.any():
        assert np.array_equal(trace.topk_indices.numpy()[trace.replay_mask], expected)
