"""What is left to one engine: columns and axes that it names, layers that it fills, requests that it mixed up."""

import numpy as np
import pytest
import torch

from megatron_router_replay import engines
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import all_moe, routes, tokens

ALL = all_moe(3, 16)
S = 91
IDS = tokens(S)
GOOD = routes(S - 1, 3, num_experts=16, topk=2).astype(np.uint8)


def test_sglang_qwen3_moe_sends_ids_on_dense_layers():
    values = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 2}
    values |= {"decoder_sparse_step": 1, "mlp_only_layers": [0]}
    array = np.concatenate([GOOD[:, :1], GOOD], axis=1).astype(np.int32)
    trace = engines.sglang.decode(array, model=values, token_ids=IDS)
    assert torch.equal(trace.topk_indices[:-1], torch.from_numpy(GOOD))
    with pytest.raises(PayloadError, match="column 0 is of a dense layer"):
        engines.vllm.decode(array, model=values, token_ids=IDS)


def test_arrays_name_their_axes():
    array = np.moveaxis(GOOD, 0, 2)[None]  # [1, layer, expert, token]
    trace = engines.array.decode(array, model=ALL, axes=("batch", "layer", "expert", "token"), num_tokens=S)
    assert torch.equal(trace.topk_indices[:-1], torch.from_numpy(GOOD))
    shuffled = engines.array.decode(
        GOOD[:, [2, 0, 1]], model=ALL, axes=("token", "layer", "expert"), layer_numbers=(3, 1, 2), num_tokens=S
    )
    assert torch.equal(shuffled.topk_indices, trace.topk_indices)
    full = np.concatenate([GOOD, GOOD[:1]])
    given = {"model": ALL, "axes": ("token", "layer", "expert"), "num_tokens": S}
    assert engines.array.decode(full, **given, last_token_routed=True).replay_mask.all()
    assert engines.array.decode(full, **given, last_token_routed=False).replay_mask.tolist() == [True] * 90 + [False]
    with pytest.raises(PayloadError, match=r"has 91 rows for tokens 0\.\.90: expected 90 "):
        engines.array.decode(full, **given)
    whole = ("token", "layer", "expert", "batch")
    for axes in (("token", "layer"), ("token", "token", "expert"), ("batch", "layer", "expert"), whole):
        with pytest.raises(PayloadError, match="axes"):
            engines.array.decode(GOOD, model=ALL, axes=axes, num_tokens=S)
    with pytest.raises(PayloadError, match="only axes of length 1"):
        engines.array.decode(np.stack([GOOD, GOOD], 3), model=ALL, axes=whole, num_tokens=S)
    with pytest.raises(PayloadError, match="names 4 layers, the array has 3"):
        engines.array.decode(GOOD, **given, layer_numbers=(1, 2, 3, 4))
    with pytest.raises(PayloadError, match="missing='skip' must be 'raise' or 'live'"):
        engines.array.decode(GOOD, **given, missing="skip")
    with pytest.raises(PayloadError, match=r"no routes of the MoE layers \[3\]"):
        engines.array.decode(GOOD, model=ALL, axes=("token", "layer", "expert"), layer_numbers=(1, 2, 4), num_tokens=S)


def test_transformers_layers_that_were_not_seen_are_named():
    seen = {1: GOOD[:, 0], 2: GOOD[:, 1]}
    with pytest.raises(PayloadError, match=r"missing \[3\]"):
        engines.transformers.decode(seen, model=ALL, token_ids=IDS)
    seen[3] = [(torch.zeros(1, 16), torch.zeros(1, 2), torch.from_numpy(GOOD[i : i + 1, 2])) for i in range(S - 1)]
    for form in (seen, {n: GOOD[None, :, n - 1] for n in (1, 2, 3)}):  # [1, tokens, topk] is of one sample
        trace = engines.transformers.decode(form, model=ALL, token_ids=IDS)
        assert torch.equal(trace.topk_indices[:-1], torch.from_numpy(GOOD))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda seen: [seen], "expected a dict by layer_number, got list"),
        (lambda seen: seen | {3: GOOD[:-1, 2]}, r"layers differ in shape: \[\(89, 2\), \(90, 2\)\]"),
        (lambda seen: seen | {3: [GOOD[:40, 2], GOOD[40:, 2, :1]]}, "the forwards of layer_number 3 differ in topk"),
        (lambda seen: seen | {3: GOOD}, r"layer_number 3 has shape \[90, 3, 2\], expected \[tokens, topk\]"),
        (lambda seen: seen | {4: GOOD[:, 2]}, r"missing \[\], unexpected \[4\]"),
    ],
)
def test_what_hooks_of_transformers_cannot_have_seen(change, message):
    with pytest.raises(PayloadError, match=message):
        engines.transformers.decode(change({n: GOOD[:, n - 1] for n in (1, 2, 3)}), model=ALL, token_ids=IDS)
