"""What a model says of its own layers, and whether a trace can be of it: models made by hand."""

import pytest
from torch import nn

from megatron_router_replay.errors import LayoutError, TraceError
from megatron_router_replay.mcore.find import main_pattern, mtp_pattern, num_decoder_layers
from megatron_router_replay.mcore.layers import check_trace_layers, layer_numbers_of, routing_info
from tests.unit.mcore.hand_made import bare, dense, model, moe, mtp

pytestmark = pytest.mark.version


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
    with pytest.raises(LayoutError, match="no config that says which of its layers route"):
        layer_numbers_of(model(moe(1), **{missing: None}))
    with pytest.raises(LayoutError, match="no config that says which of its layers route"):
        layer_numbers_of(nn.Linear(1, 1))


def test_what_routes_depend_on():
    info = routing_info(model(dense(1), moe(2), moe_layer_freq=[0, 1]))
    assert (info.num_layers, info.moe_layer_numbers, info.num_experts, info.topk) == (2, (2,), 8, 2)
    with pytest.raises(LayoutError, match="no Megatron-Core model with experts"):
        routing_info(nn.Linear(1, 1))


def test_a_trace_of_exactly_these_layers_or_of_the_whole_model_fits():
    stage = model(dense(3), moe(4), num_layers=6, mtp_num_layers=1, mtp_layers=(mtp(1, moe(1)),))
    for given in ([4], [2, 4, 6], [1, 2, 4, 5, 6], [4, 7]):
        check_trace_layers(given, stage)
    check_trace_layers([4, 7], stage, mtp=True)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([2, 6], {}, r"layer 4 .* has no routes: the trace has layers \[2, 6\]"),
        ([3, 4], {}, "routes for layer 3, but that layer of the model is dense"),
        ([4, 8], {}, "routes for layer 8, but the model has 6 layers and 1 in its MTP block: it is of a deeper model"),
        ([4], {"mtp": True}, r"MTP layer 7 .* has no routes"),
    ],
)
def test_a_trace_that_lacks_a_layer_or_has_one_too_many_is_refused(given, options, message):
    stage = model(dense(3), moe(4), num_layers=6, mtp_num_layers=1, mtp_layers=(mtp(1, moe(1)),))
    with pytest.raises(TraceError, match=message):
        check_trace_layers(given, stage, **options)


def test_without_mtp_the_layer_behind_the_last_is_of_a_deeper_model():
    check_trace_layers([1, 2], model(moe(1), moe(2)))
    with pytest.raises(TraceError, match="layer 3, but the model has 2 layers: it is of a deeper model"):
        check_trace_layers([1, 2, 3], model(moe(1), moe(2)))


def test_each_mtp_layer_has_as_many_numbers_as_its_pattern_has_symbols():
    hybrid = model(dense(1), moe(2), pattern="ME/*E/*E", mtp_num_layers=2)
    check_trace_layers([2, 6], hybrid)
    with pytest.raises(TraceError, match="layer 7, but the model has 2 layers and 4 in its MTP block"):
        check_trace_layers([2, 7], hybrid)


def test_advice_to_renumber_is_given_only_where_the_layers_are_as_many():
    hybrid = model(dense(1), moe(2), dense(3), moe(4), pattern="*E*E")
    for given in ([1, 2], [1, 3], [2, 3]):
        with pytest.raises(TraceError, match=r"routes in as many layers, \[2, 4\]: .*trace.renumber"):
            check_trace_layers(given, hybrid)
    with pytest.raises(TraceError) as caught:
        check_trace_layers([2], hybrid)
    assert "renumber" not in str(caught.value)
    # A stage without the second layer: the numbers are right, and no advice helps.
    built_otherwise = model(dense(1), moe(2), moe_layer_freq=[1, 1])
    with pytest.raises(TraceError) as caught:
        check_trace_layers([1, 2], built_otherwise)
    assert "renumber" not in str(caught.value)


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
