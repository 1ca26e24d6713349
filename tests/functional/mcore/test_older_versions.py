"""Megatron-Core 0.15: sessions work (every other file here runs with it as well), its missing RouterReplay is named."""

from importlib.metadata import version

import pytest

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelLayout
from tests.functional.mcore.cases import Case, build

pytestmark = pytest.mark.skipif(
    int(version("megatron-core").split(".")[1]) >= 16, reason="Megatron-Core has a RouterReplay since 0.16"
)


def install_and_explain() -> tuple[str, bool]:
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe import router as router_module
    from megatron.core.transformer.moe.router import TopKRouter

    _, chunks, _ = build(Case(layout=ParallelLayout()))
    before = (router_module.topk_routing_with_score_function, TopKRouter.routing)
    assert before[0] is moe_utils.topk_routing_with_score_function
    with mrr.freeze_recompute(chunks):
        assert router_module.topk_routing_with_score_function is not before[0]
    assert (router_module.topk_routing_with_score_function, TopKRouter.routing) == before
    try:
        mrr.install()
    except mrr.RouterReplayError as error:
        return f"{type(error).__name__}: {error}", mrr.explain(chunks).replayable
    return "nothing was raised", mrr.explain(chunks).replayable


def test_sessions_replay_and_install_says_that_there_is_nothing_to_replace(workers_1):
    ((message, replayable),) = workers_1.run(install_and_explain)
    assert replayable
    assert message.startswith(f"UnsupportedRouterError: Megatron-Core {version('megatron-core')}")
    assert "record and replay" in message
