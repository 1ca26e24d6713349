"""Which routers are refused, by which words, and what is said of the others: routers that are made by hand."""

import dataclasses
import re

import pytest
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

import megatron_router_replay as mrr
from megatron_router_replay.errors import UnsupportedRouterError
from megatron_router_replay.mcore.model.explanation import Explanation, RouterSupport
from megatron_router_replay.mcore.model.find import find_routers
from megatron_router_replay.mcore.model.support import check_supported, refusals, refusals_of
from tests.unit.mcore.tiny_chunk import Chunk

pytestmark = pytest.mark.version


class OtherForward(TopKRouter):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class OtherRouting(OtherForward):
    def routing(self, *args, **kwargs):
        return super().routing(*args, **kwargs)


def test_every_router_at_fault_is_named_and_one_of_no_known_class():
    chunk = Chunk()
    chunk.layers[0].router.__class__ = chunk.layers[2].router.__class__ = OtherForward
    chunk.layers[1].router.__class__ = OtherRouting
    with pytest.raises(UnsupportedRouterError) as caught:
        check_supported(find_routers(chunk))
    assert str(caught.value).splitlines() == [
        "MRR401: no session is exact with this model:",
        "  layers 1, 3: router class OtherForward overrides TopKRouter.forward",
        "  layer 2 (layers.1.router): router class OtherRouting overrides TopKRouter.forward and routing",
    ]
    assert check_supported(find_routers(Chunk())) is False  # a tested version: routing maps need no verifying
    assert refusals(nn.Linear(1, 1)) == [
        "router class Linear is not a TopKRouter; nothing is known of how it selects experts"
    ]


@pytest.mark.parametrize(("name", "value"), [("topk", 3), ("num_experts", 9)])
def test_layers_that_differ_from_the_first_are_refused(name, value):
    chunk = Chunk()
    setattr(chunk.layers[1].router, name, value)
    first, second, third = refusals_of(find_routers(chunk))
    before = getattr(chunk.layers[0].router, name)
    assert second == [
        f"{name}={value}, but layer 1 (layers.0.router) has {before}: a trace has one {name} for all layers"
    ]
    assert first == third == []
    chunk.layers[1].router.__class__ = OtherForward
    assert len(refusals_of(find_routers(chunk))[1]) == 1, "what is refused anyway is not called uneven too"


def test_a_captured_layer_is_refused_by_its_config():
    chunk = Chunk()
    first, second, third = find_routers(chunk)
    reasons = refusals_of([first, dataclasses.replace(second, is_graphed=True), third])
    assert [len(each) for each in reasons] == [0, 1, 0]
    assert re.match(r"cuda_graph_impl='none' with cuda_graph_\w+ captures the whole layer ", reasons[1][0])


def test_what_is_refused_of_mtp_layers_is_refused_of_them_alone():
    chunk = Chunk()
    chunk.config.mtp_use_repeated_layer, chunk.config.mtp_num_layers = True, 2
    *decoder, last = find_routers(chunk)
    in_mtp = dataclasses.replace(last, is_mtp=True)
    first, second, third = refusals_of([*decoder, in_mtp])
    assert first == second == []
    assert len(third) == 1
    assert "mtp_use_repeated_layer=True with mtp_num_layers=2" in third[0]
    chunk.config.mtp_num_layers = 1
    assert refusals_of([in_mtp]) == [[]], "it runs once a forward"
    chunk.config.mtp_num_layers = 2
    in_mtp.router.__class__ = OtherForward
    assert refusals_of([in_mtp]) == [["router class OtherForward overrides TopKRouter.forward"]]


def said(**changes):
    values = dict(chunk=0, name="a.router", layer_number=7, is_mtp=False, router_class="R", num_experts=8, topk=2)
    return RouterSupport(**(values | {"reason": ""} | changes))


def test_a_row_says_what_becomes_of_the_router():
    unfused = ", by Megatron-Core's unfused routing function (moe_router_fusion=True)"
    mtp = "live, and frozen for recomputes"
    start = "chunk 0  layer   7  top-2 of 8      a.router: "
    assert str(said()) == start + "replayed"
    assert str(said(unfused=True)) == start + "replayed" + unfused
    assert str(said(is_mtp=True)) == start + mtp
    assert str(said(is_mtp=True, unfused=True)) == start + mtp + unfused
    assert str(said(reason="why", is_mtp=True, unfused=True)) == start + "refused: why"
    assert str(said(hashed=True, is_mtp=True)).startswith(start + "left alone: a table of token ids routes it")
    routers = [said(layer_number=number, name=f"layers.{number}.router") for number in range(4, 62)]
    odd = said(layer_number=62, name="layers.62.router", reason="why")
    assert str(Explanation([*routers, odd])).splitlines() == [
        "chunk 0  layers 4 to 61  top-2 of 8  layers.4.router ... layers.61.router: replayed",
        "chunk 0  layer  62  top-2 of 8      layers.62.router: refused: why",
    ]
    assert str(Explanation(routers[:8])) == "\n".join(map(str, routers[:8]))


def test_a_model_is_replayable_if_it_has_routers_and_all_are():
    assert not Explanation().replayable
    assert str(Explanation()) == "no MoE routers on this rank"
    chunk = Chunk()
    chunk.layers[1].router = nn.Linear(1, 1)  # no router that anybody could find
    chunk.layers[2].router.__class__ = OtherForward
    rows = mrr.explain([Chunk(), chunk])
    assert [(row.chunk, row.layer_number, row.replayable) for row in rows] == [
        *[(0, 1, True), (0, 2, True), (0, 3, True)],
        *[(1, 1, True), (1, 3, False)],
    ]
    assert not any(row.unfused for row in rows)
    assert (rows[4].router_class, rows[4].topk, rows[4].num_experts) == ("OtherForward", 2, 8)


def test_slimes_bridge_that_dispatches_by_a_topk_of_its_own_is_refused_by_name():
    chunk = Chunk()
    chunk.layers[1].router._slime_ordered_topk_capture_registered = True
    assert [len(reasons) for reasons in refusals_of(find_routers(chunk))] == [0, 1, 0]
    with pytest.raises(UnsupportedRouterError, match=r"layer 2 .*slime's DeepEP alignment bridge"):
        mrr.freeze_recompute(chunk)
