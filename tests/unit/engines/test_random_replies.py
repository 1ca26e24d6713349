"""Any value in any place of a reply: legal routes or a refusal, in 512 MiB of memory; an unchanged one has its own routes."""

import copy
import resource
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_router_replay import engines
from megatron_router_replay.errors import RouterReplayError
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


NAMES = (
    "choices outputs routed_experts prompt_routed_experts token_ids meta_info sglext prompt_token_ids usage id index x "
    "finish_reason output_ids moe_topk_indices routing_indices weight_versions metadata message data shape dtype start "
    "prompt_tokens completion_tokens total_tokens routed_experts_start_len error detail object type length"
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-9, 999), st.floats(), st.text(), st.binary(),
    st.sampled_from([0, 1]).map(lambda choice: [2**40, 10**9000][choice]),  # Python refuses to write the latter out
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
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from places(tree[key])


@given(
    form=st.sampled_from([form for form in FORMS if "array" not in form]),
    num_prompt=st.integers(1, 9), num_output=st.integers(2, 9), value=VALUES, ids=VALUES, data=st.data(),
)  # fmt: skip
@settings(max_examples=1200, deadline=2000)
def test_any_value_is_a_trace_of_legal_routes_or_refused(form, num_prompt, num_output, value, ids, data):
    prompt, output = tokens(num_prompt), tokens(num_output, seed=2)
    rows = with_dense(routes(num_prompt + num_output - 1, 3, num_experts=E, topk=K), L, MOE).astype(np.uint16)
    reply = FORMS[form](rows[:, MOE] if form.startswith("megatron") else rows, prompt, output)
    decoder, reply, key = getattr(engines, form.split()[0]), copy.deepcopy(reply), None
    change = data.draw(st.sampled_from(["none", "whole", "inside"]))
    if change == "inside" and (inner := list(places(reply))):
        container, key = data.draw(st.sampled_from(inner))
        container[key] = value
    given_ids = {} if ids is None else {"token_ids": ids if data.draw(st.booleans()) else prompt + output}
    try:
        result = value if change == "whole" else reply
        trace = (decoder.decode if given_ids else decoder.decode_batch)(result, model=MODEL, **given_ids)
    except RouterReplayError:
        assert change != "none" or given_ids.get("token_ids") != prompt + output
        return
    chosen = np.sort(trace.topk_indices.numpy(), axis=2)
    assert 0 <= chosen.min(initial=0) <= chosen.max(initial=0) < E
    assert (chosen[:, :, 1:] != chosen[:, :, :-1]).all()
    assert sum(trace.sequence_lengths) == trace.num_tokens == len(trace.replay_mask)
    if change == "none" or (isinstance(key, str) and "rout" not in key and trace.replay_mask.any()):
        assert np.array_equal(trace.topk_indices.numpy()[trace.replay_mask], rows[:, MOE])
