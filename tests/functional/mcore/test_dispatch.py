"""What real token dispatchers get is what left the router, in settings that `test_layouts` does not run."""

from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe import token_dispatcher

import megatron_router_replay as mrr
from tests.functional.mcore.cases import MTP_RECOMPUTE, Case, build, moe_routers, random_trace, run

SETTINGS: dict[str, dict[str, Any]] = {
    "MTP": {"mtp_num_layers": 1} | MTP_RECOMPUTE,
    "capacity": {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "position"},
    "shared expert, aux loss and bias": {
        "moe_shared_expert_intermediate_size": 32,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
}


@pytest.mark.parametrize(("kind", "name"), [*(("alltoall", name) for name in SETTINGS), ("allgather", "capacity")])
def test_every_call_of_a_router_is_seen_in_its_dispatcher(name, kind, megatron):
    case = Case(config=SETTINGS[name] | {"moe_token_dispatcher_type": kind})
    _, chunks, microbatches = build(case)
    for router in moe_routers(chunks):  # an alias of both tensors reaches the dispatcher
        router.register_full_backward_hook(lambda *_: None)
    padded = mock.patch.object(token_dispatcher, "get_align_size_for_quantization", return_value=16, create=True)
    eager = torch.compiler.set_stance("force_eager")  # Megatron-Core compiles what counts for the bias: ten seconds
    with eager, padded, mrr.replay(chunks, random_trace(case), verify="capacity" not in name) as session:
        run(chunks, case, microbatches, session)
    report = session.report
    if "capacity" not in name:
        calls, rows = report.forwards + report.recomputes, microbatches[0]["rows"].numel()
        assert report.decisions["verified"] == calls * rows
    assert report.decisions.get("wrong", 0) == 0
