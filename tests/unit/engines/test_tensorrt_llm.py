"""TensorRT-LLM's outputs as its pull request 18397 describes them: [S - 1, MoE layers, topk] on each CompletionOutput."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_router_replay import engines
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import routes, tokens

MODEL = engines.ModelRoutingInfo(num_layers=5, moe_layer_numbers=(3, 4, 5), num_experts=300, topk=4)
P, G = 6, 4
S = P + G
PROMPT = tokens(P)


def rows(i):
    return routes(S - 1, 3, num_experts=300, topk=4, seed=i).astype(np.int32)


def completion(i, array=None, **fields):
    values = {"index": i, "token_ids": tokens(G, seed=30 + i), "finish_reason": "length"}
    return SimpleNamespace(
        **(values | {"routed_experts": torch.from_numpy(rows(i)) if array is None else array} | fields)
    )


def output(*completions, request=1):
    return SimpleNamespace(request_id=request, prompt_token_ids=PROMPT, outputs=list(completions))


def check(trace, i):
    assert torch.equal(trace.topk_indices[:-1].long(), torch.from_numpy(rows(i)).long())
    assert trace.token_ids.tolist() == PROMPT + tokens(G, seed=30 + i)
    assert trace.replay_mask.tolist() == [True] * (S - 1) + [False]
    assert trace.layer_numbers == (3, 4, 5)


def test_outputs_choices_and_lists():
    decode, batch = engines.tensorrt_llm.decode, engines.tensorrt_llm.decode_batch
    check(decode(output(completion(0)), model=MODEL), 0)
    check(decode(completion(0), model=MODEL, prompt_token_ids=PROMPT), 0)
    check(decode(rows(0), model=MODEL, token_ids=PROMPT + tokens(G, seed=30)), 0)
    as_dict = {"prompt_token_ids": PROMPT, "outputs": [vars(completion(0, rows(0).tolist()))]}
    check(decode(as_dict, model=MODEL), 0)
    for result in (
        output(completion(1), completion(0)),
        [output(completion(0)), output(SimpleNamespace(**(vars(completion(1)) | {"index": 0})))],
    ):
        for i, sample in enumerate(batch(result, model=MODEL).samples()):
            check(sample, i)
    assert batch([as_dict, as_dict], model=MODEL).sequence_lengths == (S, S)


WRONG = [rows(0)[:-1], np.concatenate([rows(0), rows(0)[:1]]), rows(0)[:, :2], rows(0)[:, :, :3], rows(0) * 0, "AAAA"]


@pytest.mark.parametrize("array", WRONG)
def test_what_does_not_fit_is_refused(array):
    with pytest.raises(PayloadError):
        engines.tensorrt_llm.decode(output(completion(0, array)), model=MODEL)


def test_missing_routes_and_cancelled_requests():
    with pytest.raises(PayloadError, match="missing, though the model has MoE layers"):
        engines.tensorrt_llm.decode(output(completion(0, routed_experts=None)), model=MODEL)
    cancelled = output(completion(0, routed_experts=None, token_ids=[], finish_reason="cancelled"))
    trace = engines.tensorrt_llm.decode(cancelled, model=MODEL)
    assert trace.token_ids.tolist() == PROMPT
    assert not trace.replay_mask.any()
