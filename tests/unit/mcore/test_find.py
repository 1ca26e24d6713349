"""Which routers a model has, and which layer each is in: read off modules that are made by hand."""

import pytest
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from torch import nn

from megatron_router_replay.errors import LayoutError
from megatron_router_replay.mcore.find import (
    as_chunks,
    check_has_experts,
    check_whole_pipeline,
    find_routers,
    router_wrappers,
    unwrap,
    wrappers,
)
from tests.unit.mcore.hand_made import bare, dense, model, moe, mtp

pytestmark = pytest.mark.version


class Compiled(nn.Module):
    """As torch.compile's wrapper: it answers for the attributes of what it wraps."""

    def __init__(self, wrapped):
        super().__init__()
        self._orig_mod = wrapped

    def __getattr__(self, name):
        own = self.__dict__["_modules"]
        return own[name] if name in own else getattr(own["_orig_mod"], name)


def test_every_wrapper_is_seen_through_torch_compiles_own_first():
    inner = model(moe(1))
    half = bare(nn.Module, module=inner)
    compiled = Compiled(half)
    whole = bare(nn.Module, module=compiled)
    assert wrappers(whole) == [whole, compiled, half, inner]
    assert unwrap(whole) is inner
    assert unwrap(inner) is inner


def test_routers_are_named_by_their_path_and_ordered_by_their_layer():
    chunk = model(moe(7), dense(2), moe(3))
    chunk.alias = chunk.decoder.layers[0]  # in two places, which is one layer
    found = find_routers(bare(nn.Module, module=chunk))
    assert [(each.name, each.layer_number, each.is_mtp) for each in found] == [
        ("decoder.layers.2.router", 3, False),
        ("decoder.layers.0.router", 7, False),
    ]
    assert str(found[0]) == "layer 3 (decoder.layers.2.router)"


class ForeignMoE(BaseMoELayer):
    def forward(self, hidden):
        return hidden


def test_what_an_moe_layer_routes_with_is_found_whatever_its_class():
    foreign = bare(ForeignMoE, router=bare(nn.Linear, layer_number=2))
    routers = [each.router for each in find_routers(model(moe(1), foreign))]
    assert routers[1] is foreign.router


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([moe(1), moe(2), moe(2)], r"layer 2 \(decoder.layers.1.router\) and layer 2 \(decoder.layers.2.router\)"),
        ([moe(None)], "router 'decoder.layers.0.router' .TopKRouter. has no layer_number"),
    ],
)
def test_a_router_without_a_layer_of_its_own_is_refused(layers, message):
    with pytest.raises(LayoutError, match=message):
        find_routers(model(*layers))


@pytest.mark.parametrize(
    ("mtp_layers", "config", "expected"),
    [
        # Their routers start at 1 again. Four layers in the decoder of the whole model, one of them on this rank.
        ([mtp(1, moe(1)), mtp(2, moe(1))], {"num_layers": 4}, [5, 6]),
        ([mtp(1, moe(1), name="transformer_layer")], {"num_layers": 4}, [5]),
        # Each layer inside has a number, routing or not.
        ([mtp(depth, moe(1), dense(2), moe(3)) for depth in (1, 2)], {"num_layers": 4}, [5, 7, 8, 10]),
        ([mtp(1, moe(1))], {"pattern": "M|EME/E", "num_layers": 99}, [5]),
    ],
)
def test_layers_of_mtp_count_on_behind_the_decoders_last(mtp_layers, config, expected):
    found = find_routers(model(moe(4), mtp_layers=tuple(mtp_layers), **config))
    assert [(each.layer_number, each.is_mtp) for each in found] == [(4, False), *((each, True) for each in expected)]
    assert str(found[1]).startswith("MTP layer 5 (mtp.0.")


def test_chunks_are_one_model_or_several_and_never_one_twice():
    one, other = model(moe(1)), model(moe(2))
    assert as_chunks(one) == [one]
    assert as_chunks((one, other)) == [one, other]
    for wrong in ([], [one, None], "abc"):
        with pytest.raises(LayoutError, match="must be a model or a list of its chunks"):
            as_chunks(wrong)
    with pytest.raises(LayoutError, match="holds 2 entries, but some of them are the same model"):
        as_chunks([one, bare(nn.Module, module=one)])


def test_a_module_without_routers_is_a_stage_of_a_model_with_experts_or_refused():
    stage, no_experts, with_router = model(dense(1)), model(dense(1), num_moe_experts=None), bare(nn.Module)
    with_router.layer = moe(1)
    check_has_experts([stage, with_router], [find_routers(stage), find_routers(with_router)])
    for wrong, why in ((no_experts, "its config has num_moe_experts=None"), (nn.Linear(1, 1), "it has no config")):
        with pytest.raises(LayoutError, match=why):
            check_has_experts([stage, bare(nn.Module, module=wrong)], [[], []])


class Module(nn.Module):
    def forward(self, *args):
        raise AssertionError("it is not called")


def test_a_wrapper_without_a_config_has_one_child_with_routers_and_that_has_a_config():
    policy = model(moe(1))
    actor_critic = bare(Module, policy=bare(Module, inner=policy), value_head=nn.Linear(1, 1))
    assert unwrap(actor_critic) is policy
    two = bare(Module, policy=policy, critic=model(moe(1)))
    assert wrappers(two) == [two], "which of them it stands for cannot be told"
    layers = bare(Module, layer=bare(Module, inner=moe(1)))
    assert wrappers(layers) == [layers], "the layers of a model are no models"


def test_a_router_inside_what_an_moe_layer_routes_with_is_the_one_that_is_found():
    inner = moe(2).router
    adapter = bare(Module, base=inner, scale=nn.Linear(1, 1))
    chunk = model(moe(1), bare(ForeignMoE, router=adapter))
    found = find_routers(chunk)
    assert [each.name for each in found] == ["decoder.layers.0.router", "decoder.layers.1.router.base"]
    assert router_wrappers(chunk) == {inner: adapter}


@pytest.mark.parametrize(("size", "whole"), [(None, True), (1, True), (2, True), (3, False)])
def test_all_chunks_of_a_virtual_pipeline_are_there_or_the_number_is_named(size, whole):
    chunks = [model(moe(number), virtual_pipeline_model_parallel_size=size) for number in (1, 2)]
    if whole:
        check_whole_pipeline(chunks)
        return
    with pytest.raises(LayoutError, match=r"2 model chunks were given, but this rank has 3 .*not model\[0\]"):
        check_whole_pipeline([bare(nn.Module, module=chunk) for chunk in chunks])
