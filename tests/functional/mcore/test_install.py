"""Our RouterReplay in Megatron-Core's place: its usage guide's flow, and the class put back."""

from typing import Any

import torch

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes, build_tiny_gpt, random_microbatches, tiny_gpt_config

NUM_LAYERS = 2


def build_with_flag() -> tuple[Any, list[Any], dict[str, Any]]:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import TopKRouter

    layout = ParallelSizes()
    if not parallel_state.is_initialized():
        layout.initialize()
    config = tiny_gpt_config(layout, num_layers=NUM_LAYERS, moe_enable_routing_replay=True)
    (model,) = build_tiny_gpt(config, layout)
    (microbatch,) = random_microbatches(1)
    inputs = {
        "input_ids": microbatch["tokens"],
        "position_ids": microbatch["position_ids"],
        "attention_mask": None,
        "labels": microbatch["labels"],
    }
    return model, [module for module in model.modules() if isinstance(module, TopKRouter)], inputs


def install_and_uninstall() -> dict[str, Any]:
    from megatron.core.transformer.moe import moe_utils, router, router_replay

    places = (router_replay, router, moe_utils)
    before = [module.RouterReplay for module in places] + [router_replay.RouterReplayAction]
    mrr.install()
    mrr.install()
    try:
        installed = [module.RouterReplay is mrr.RouterReplay for module in places]
        listed_before = list(mrr.RouterReplay.global_router_replay_instances)  # other tests ran in this process
        _, routers, _ = build_with_flag()
        built = [type(router.router_replay) is mrr.RouterReplay for router in routers]
        listed = mrr.RouterReplay.global_router_replay_instances == listed_before + [r.router_replay for r in routers]
    finally:
        mrr.uninstall()
        mrr.uninstall()
        mrr.RouterReplay.clear_global_router_replay_instances()
    after = [module.RouterReplay for module in places] + [router_replay.RouterReplayAction]
    _, routers, _ = build_with_flag()
    return {
        "installed": installed,
        "built": built,
        "listed": listed,
        "original objects back": all(one is other for one, other in zip(before, after)),
        "built after": [type(router.router_replay) is before[0] for router in routers],
    }


def test_install_makes_the_flag_build_ours_and_uninstall_restores_the_original_objects(workers_1):
    (result,) = workers_1.run(install_and_uninstall)
    assert result == {
        "installed": [True] * 3,
        "built": [True] * NUM_LAYERS,
        "listed": True,
        "original objects back": True,
        "built after": [True] * NUM_LAYERS,
    }


def usage_guide(path: str) -> dict[str, Any]:
    """Megatron-Core's guide, section 5, step by step, with our import: record, save, replay, recompute, clean up."""
    from megatron_router_replay import RouterReplay, RouterReplayAction

    mrr.install()
    try:
        model, routers, inputs = build_with_flag()
    finally:
        mrr.uninstall()

    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    recorded_loss = model(**inputs).sum()
    torch.save(RouterReplay.get_recorded_data(), path)

    changed = [indices.flip(0) for indices in torch.load(path)]
    RouterReplay.set_replay_data(changed)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    maps: list[torch.Tensor] = []
    handles = [router.register_forward_hook(lambda m, a, output: maps.append(output[1])) for router in routers]
    replayed_loss = model(**inputs).sum()

    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    again_loss = model(**inputs).sum()
    for handle in handles:
        handle.remove()

    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_action()
    live_loss = model(**inputs).sum()
    RouterReplay.clear_global_router_replay_instances()
    expected = [torch.zeros(16, 8, dtype=torch.bool).scatter(1, indices, True) for indices in changed]
    return {
        "replayed what was set": all(torch.equal(a, b) for a, b in zip(maps, expected * 2, strict=True)),
        "backward as forward": torch.equal(replayed_loss, again_loss),
        "another route, another loss": not torch.equal(recorded_loss, replayed_loss),
        "live again": torch.equal(recorded_loss, live_loss),
        "instances": len(RouterReplay.global_router_replay_instances),
    }


def test_the_usage_guide_of_megatron_core_works_with_our_class(workers_1, tmp_path):
    assert workers_1.run(usage_guide, str(tmp_path / "replay.pt")) == [
        {
            "replayed what was set": True,
            "backward as forward": True,
            "another route, another loss": True,
            "live again": True,
            "instances": 0,
        }
    ]


def quick_usage(path: str) -> list[bool]:
    """The guide's second example: one RouterReplay and topk_routing_with_score_function, no model."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    from megatron_router_replay import RouterReplay, RouterReplayAction

    rr = RouterReplay()
    options = {"topk": 2, "use_pre_softmax": False, "score_function": "softmax", "router_replay": rr}
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    logits = torch.randn(8, 16)
    probs_rec, routing_map_rec = topk_routing_with_score_function(logits=logits, **options)
    torch.save(rr.get_recorded_indices(), path)
    rr.clear_router_replay_action()
    rr.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    rr.set_target_indices(torch.load(path))
    probs_rep, routing_map_rep = topk_routing_with_score_function(logits=logits, **options)
    RouterReplay.clear_global_router_replay_action()
    RouterReplay.clear_global_indices()
    RouterReplay.clear_global_router_replay_instances()
    return [torch.equal(probs_rec, probs_rep), torch.equal(routing_map_rec, routing_map_rep)]


def test_the_guides_quick_usage_works(workers_1, tmp_path):
    assert workers_1.run(quick_usage, str(tmp_path / "replay.pt")) == [[True, True]]


def sessions_over_megatrons_own_class() -> dict[str, Any]:
    """A session on a model that was built with Megatron-Core's own RouterReplay puts that very object back."""
    model, routers, _ = build_with_flag()
    own = [router.router_replay for router in routers]
    with mrr.freeze_recompute(model):
        during = [router.router_replay in own for router in routers]
    return {"during": during, "back": all(router.router_replay is o for router, o in zip(routers, own))}


def test_a_session_puts_megatrons_own_object_back(workers_1):
    assert workers_1.run(sessions_over_megatrons_own_class) == [{"during": [False] * NUM_LAYERS, "back": True}]
