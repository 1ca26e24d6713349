"""Our RouterReplay in Megatron-Core's place: its usage guide's flow, and the class put back; sessions need neither."""

from typing import Any

import pytest
import torch

import megatron_router_replay as mrr
from megatron_router_replay.mcore import RouterReplay, RouterReplayAction
from tests.functional.mcore.cases import Case, as_map, build, model_inputs, moe_routers

pytestmark = [pytest.mark.version, pytest.mark.usefixtures("megatron")]
CASE = Case(config={"num_layers": 2, "moe_enable_routing_replay": True}, num_microbatches=1)


def build_with_flag() -> tuple[Any, list[Any], dict[str, Any]]:
    _, (model,), (microbatch,) = build(CASE)
    return model, moe_routers([model]), model_inputs(microbatch)


def test_the_usage_guide_of_megatron_core_works_with_our_class(tmp_path):
    """Its section 5, step by step, with our import: record, save, replay, recompute, clean up."""
    mrr.install()
    try:
        model, routers, inputs = build_with_flag()
    finally:
        mrr.uninstall()
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    recorded_loss = model(**inputs).sum()
    torch.save(RouterReplay.get_recorded_data(), tmp_path / "replay.pt")

    changed = [indices.flip(0) for indices in torch.load(tmp_path / "replay.pt")]
    RouterReplay.set_replay_data(changed)
    maps: list[torch.Tensor] = []
    for router in routers:
        router.register_forward_hook(lambda module, args, output: maps.append(output[1]))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    replayed_loss = model(**inputs).sum()
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    assert torch.equal(model(**inputs).sum(), replayed_loss)
    assert all(torch.equal(*pair) for pair in zip(maps, [as_map(indices) for indices in changed] * 2, strict=True))
    assert not torch.equal(recorded_loss, replayed_loss)

    mrr.install()  # Megatron-Core's module names our class from here on, which must not call itself
    try:
        RouterReplay.set_replay_data(changed)
        routers[0].router_replay.set_target_indices(changed[0])
    finally:
        mrr.uninstall()
    assert torch.equal(routers[0].router_replay.target_topk_idx, changed[0])

    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()
    assert torch.equal(model(**inputs).sum(), recorded_loss)
    RouterReplay.clear_global_router_replay_instances()
    assert RouterReplay.global_router_replay_instances == []
