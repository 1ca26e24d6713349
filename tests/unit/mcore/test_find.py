"""The routers of a model, their layers, and the layers of a trace that fits: on modules made by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_router_replay.errors import LayoutError, TraceError
from megatron_router_replay.mcore.model.find import (
    as_chunks,
    check_has_experts,
    check_whole_pipeline,
    find_routers,
    main_pattern,
    mtp_pattern,
    num_decoder_layers,
    unwrap,
    walk,
    wrappers,
)
from megatron_router_replay.mcore.model.layers import check_trace_layers, layer_numbers_of, routing_info
from tests.unit.mcore.tiny_chunk import bare


def moe(number: int | None) -> Any:
    """Return a layer that routes."""
    return bare(TransformerLayer, layer_number=number, router=bare(TopKRouter, layer_number=number))


def dense(number: int) -> Any:
    return bare(TransformerLayer, layer_number=number)


def mtp(number: int, *layers: Any, name: str = "mtp_model_layer") -> Any:
    """Return a multi-token-prediction layer: around one transformer layer, or around a stack of several."""
    inner = layers[0] if len(layers) == 1 else bare(nn.Module, layers=nn.ModuleList(layers))
    return bare(MultiTokenPredictionLayer, layer_number=number, **{name: inner})


def model(*layers: Any, mtp_layers: tuple[Any, ...] = (), pattern: str | None = None, **config: Any) -> nn.Module:
    """Return a chunk with these layers in its decoder; the config is one of experts, by default."""
    whole = bare(nn.Module, decoder=bare(nn.Module, layers=nn.ModuleList(layers)), mtp=nn.ModuleList(mtp_layers))
    whole.config = SimpleNamespace(
        **{"num_layers": len(layers), "num_moe_experts": 8, "moe_router_topk": 2, "moe_layer_freq": 1} | config
    )
    if pattern is not None:
        whole.hybrid_layer_pattern = pattern
    return whole


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


class Module(nn.Module):
    def forward(self, *args):
        raise AssertionError("it is not called")


class ForeignMoE(BaseMoELayer):
    def forward(self, hidden):
        return hidden


@pytest.mark.parametrize(
    ("router", "name"),
    [
        (bare(nn.Linear, layer_number=2), "decoder.layers.1.router"),
        (bare(Module, base=moe(2).router, scale=nn.Linear(1, 1)), "decoder.layers.1.router.base"),
    ],
    ids=["of another class", "an adapter around a router"],
)
def test_what_an_moe_layer_routes_with_is_found_whatever_its_class(router, name):
    found = find_routers(model(moe(1), bare(ForeignMoE, router=router)))
    assert [each.name for each in found] == ["decoder.layers.0.router", name]


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


def test_a_router_whose_whole_layer_is_captured_into_a_cuda_graph_is_marked():
    """As a GPT model's layers are with cuda_graph_impl="local" and "attn" captured; a block's manager is of inference."""
    captured, chunk = moe(1), model(moe(2))
    captured.cudagraph_manager = nn.Identity()
    chunk.decoder.cudagraph_manager = nn.Identity()
    chunk.decoder.layers.append(captured)
    assert [each.is_graphed for each in find_routers(chunk)] == [True, False]


@pytest.mark.parametrize(
    ("mtp_layers", "config", "expected"),
    [
        # Their routers start at 1 again; each layer inside has a number, routing or not.
        ([mtp(1, moe(1), name="transformer_layer")], {"num_layers": 4}, [5]),
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
    for wrong, kind in (([], "an empty list"), ([[one]], "a list of lists: pass the inner one"), ("abc", "str")):
        with pytest.raises(LayoutError, match=f"on this rank, got {kind}"):
            as_chunks(wrong)
    with pytest.raises(LayoutError, match="2 model_chunks were given, but some of them are the same model"):
        as_chunks([one, bare(nn.Module, module=one)])


def test_a_module_without_routers_is_a_stage_of_a_model_with_experts_or_refused():
    stage, no_experts, with_router = model(dense(1)), model(dense(1), num_moe_experts=None), bare(nn.Module)
    with_router.layer = moe(1)
    check_has_experts([walk(stage), walk(with_router)])
    for wrong, why in ((no_experts, "its config has num_moe_experts=None"), (nn.Linear(1, 1), "it has no config")):
        with pytest.raises(LayoutError, match=why):
            check_has_experts([walk(stage), walk(bare(nn.Module, module=wrong))])


def test_a_wrapper_without_a_config_has_one_child_with_routers_and_that_has_a_config():
    policy = model(moe(1))
    actor_critic = bare(Module, policy=bare(Module, inner=policy), value_head=nn.Linear(1, 1))
    assert unwrap(actor_critic) is policy
    two = bare(Module, policy=policy, critic=model(moe(1)))
    assert wrappers(two) == [two], "either may be the model"
    layers = bare(Module, layer=bare(Module, inner=moe(1)))
    assert wrappers(layers) == [layers], "the layers of a model are no models"


@pytest.mark.parametrize("size", [None, 1, 2])
def test_all_chunks_of_a_virtual_pipeline_are_there(size):
    check_whole_pipeline([walk(model(moe(number), virtual_pipeline_model_parallel_size=size)) for number in (1, 2)])


def test_a_missing_chunk_of_a_virtual_pipeline_raises():
    chunks = [model(moe(number), virtual_pipeline_model_parallel_size=3) for number in (1, 2)]
    with pytest.raises(LayoutError, match=r"2 model chunks were given, but this rank has 3 .*not model\[0\]"):
        check_whole_pipeline([walk(bare(nn.Module, module=chunk)) for chunk in chunks])


@pytest.mark.parametrize(
    ("layers", "config", "expected"),
    [
        ([moe(1), moe(2), moe(3)], {}, (1, 2, 3)),
        ([moe(1), dense(2), moe(3), dense(4), moe(5)], {"moe_layer_freq": 2}, (1, 3, 5)),
        ([moe(1), dense(2), dense(3), moe(4)], {"moe_layer_freq": 3}, (1, 4)),
        ([dense(1), moe(2), moe(3)], {"moe_layer_freq": [0, 1, 1]}, (2, 3)),
        ([dense(1), dense(2)], {"num_moe_experts": None}, ()),
        ([moe(4)], {"num_layers": 4}, (1, 2, 3, 4)),  # the last stage of four
        ([dense(1), moe(2), dense(3), moe(4)], {"pattern": "ME|*E/E", "num_layers": 9}, (2, 4)),
    ],
)
def test_the_whole_models_layers_are_told_from_any_stage(layers, config, expected):
    chunk = model(*layers, mtp_layers=(mtp(1, moe(1)),), **config)
    assert layer_numbers_of(bare(nn.Module, module=chunk)) == expected


def test_several_chunks_are_held_against_what_the_first_says():
    first, second = (model(moe(number), num_layers=4) for number in (1, 3))
    assert layer_numbers_of([first, second]) == (1, 2, 3, 4)
    dense_one = model(dense(3), num_layers=4)
    with pytest.raises(
        LayoutError, match=r"layers \[1, 2, 3, 4\] route, but of this rank's layers \[1, 3\] these do: \[1\]"
    ):
        layer_numbers_of([first, dense_one])


@pytest.mark.parametrize("missing", ["moe_layer_freq", "num_layers"])
def test_a_model_that_does_not_say_is_not_guessed(missing):
    with pytest.raises(LayoutError, match="no config that lists the layers that route"):
        layer_numbers_of(model(moe(1), **{missing: None}))
    with pytest.raises(LayoutError, match="no config that lists the layers that route"):
        layer_numbers_of(nn.Linear(1, 1))


def test_routing_info_has_the_layers_experts_and_topk_of_the_config():
    info = routing_info(model(dense(1), moe(2), moe_layer_freq=[0, 1]))
    assert (info.num_layers, info.moe_layer_numbers, info.num_experts, info.topk) == (2, (2,), 8, 2)
    with pytest.raises(LayoutError, match="no Megatron-Core model with experts"):
        routing_info(nn.Linear(1, 1))


STAGE = model(dense(3), moe(4), num_layers=6, mtp_num_layers=1, mtp_layers=(mtp(1, moe(1)),))
WHOLE = model(moe(1), moe(2))
VIRTUAL_STAGES = [model(layer, num_layers=4) for layer in (moe(1), dense(3))]
WITH_PATTERN = model(dense(1), moe(2), dense(3), moe(4), pattern="*E*E")
WITH_MTP_PATTERN = model(dense(1), moe(2), pattern="ME/*E/*E", mtp_num_layers=2)
BUILT_OTHERWISE = model(dense(1), moe(2), moe_layer_freq=[1, 1])  # the numbers are right, and no advice helps
IN_MTP_BLOCK = "layers and {} in its MTP block: it is of a deeper model"
RENUMBER = r"routes in as many layers, \[2, 4\]: .*trace.renumber"
NO_ADVICE = r"(?s)^(?!.*renumber)"


@pytest.mark.parametrize(
    ("of", "given", "message"),
    [
        *((STAGE, given, None) for given in ([4], [2, 4, 6], [1, 2, 4, 5, 6], [4, 7])),
        (STAGE, [2, 6], r"layer 4 .* has no routes: the trace has layers \[2, 6\]"),
        (STAGE, [3, 4], "routes for layer 3, but that layer of the model is dense"),
        (VIRTUAL_STAGES, [1, 2, 4], None),
        (VIRTUAL_STAGES, [1, 3], "routes for layer 3, but that layer of the model is dense"),
        (STAGE, [4, 8], f"routes for layer 8, but the model has 6 {IN_MTP_BLOCK.format(1)}"),
        (WHOLE, [1, 2], None),
        (WHOLE, [1, 2, 3], "layer 3, but the model has 2 layers: it is of a deeper model"),
        (WITH_MTP_PATTERN, [2, 6], None),  # as many numbers as the pattern has symbols
        (WITH_MTP_PATTERN, [2, 7], f"layer 7, but the model has 2 {IN_MTP_BLOCK.format(4)}"),
        *((WITH_PATTERN, given, RENUMBER) for given in ([1, 2], [1, 3], [2, 3])),
        (WITH_PATTERN, [2], NO_ADVICE),
        (BUILT_OTHERWISE, [1, 2], NO_ADVICE),
    ],
)
def test_a_trace_has_the_layers_of_the_stage_or_of_the_whole_model(of, given, message):
    walks = [walk(chunk) for chunk in as_chunks(of)]
    if message is None:
        check_trace_layers(given, walks)
        return
    with pytest.raises(TraceError, match=message):
        check_trace_layers(given, walks)


def with_tower(*layers: Any, **tower: Any) -> nn.Module:
    """Return a stage of a vision-language model of six layers; its tower has layers 1 to 3, and a config of its own."""
    text = SimpleNamespace(
        num_layers=6, hidden_size=64, num_moe_experts=8, moe_layer_freq=[0, 1, 1, 1, 0, 1], moe_router_topk=2
    )
    vision = SimpleNamespace(**vars(text) | {"num_layers": 3, "num_moe_experts": None} | tower)
    dense_alone = SimpleNamespace(**vars(text) | {"num_moe_experts": None})
    for each in layers:
        each.config = text if hasattr(each, "router") else dense_alone
    blocks = [bare(TransformerLayer, layer_number=number, config=vision) for number in (1, 2, 3)]
    language = bare(nn.Module, config=text, decoder=bare(nn.Module, layers=nn.ModuleList(layers)))
    return bare(nn.Module, config=text, vision_model=nn.ModuleList(blocks), language_model=language)


@pytest.mark.parametrize(
    "tower",
    [
        {},
        {"num_moe_experts": 8},
        {"num_layers": 6, "hidden_size": 32},
        {"num_layers": 6, "hidden_size": 32, "num_moe_experts": 8},
    ],
)
@pytest.mark.parametrize("layers", [(dense(1), moe(2)), (moe(3), moe(4)), (dense(5), moe(6))], ids=["1", "2", "3"])
def test_layers_of_a_vision_tower_are_no_layers_of_the_decoder(layers, tower):
    stage = with_tower(*layers, **tower)
    assert layer_numbers_of(stage) == (2, 3, 4, 6)
    check_trace_layers((2, 3, 4, 6), [walk(stage)])
    # A dense layer of the decoder stays one, also where its config has no experts.
    for number in {each.layer_number for each in layers if not hasattr(each, "router")}:
        with pytest.raises(TraceError, match=f"MRR405: the trace has routes for layer {number}, but that layer"):
            check_trace_layers(sorted({2, 3, 4, 6, number}), [walk(stage)])
    with pytest.raises(LayoutError, match="MRR411"):
        layer_numbers_of(with_tower(dense(3), moe(4), **tower))


def test_patterns_of_hybrid_models():
    hybrid, plain = model(pattern="M*E|ME/*E/*E"), model(num_layers=5)
    assert (main_pattern(hybrid), mtp_pattern(hybrid), num_decoder_layers(hybrid)) == ("M*EME", "*E", 5)
    assert (main_pattern(plain), mtp_pattern(plain), num_decoder_layers(plain)) == (None, None, 5)
    assert mtp_pattern(model(pattern="ME")) is None
    assert mtp_pattern(model(pattern="ME/*E")) == "*E"
    older = model()
    older.hybrid_layer_pattern, older.hybrid_override_pattern = None, "MEM"
    assert num_decoder_layers(older) == 3
    assert num_decoder_layers(nn.Linear(1, 1)) == 0
    assert num_decoder_layers(model(num_layers=None)) == 0
