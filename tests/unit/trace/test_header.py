"""What kind of trace this is: fields, checks, bytes and JSON."""

import pytest

from megatron_router_replay.errors import TraceError
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.header import TraceFormat, TraceHeader

PLAIN = TraceFormat(layer_numbers=(2, 3, 5), topk=8, num_experts=128)
FULL = TraceFormat(layer_numbers=(4,), topk=2, num_experts=300, has_token_ids=True, has_weight_version=True)


def test_a_row_takes_its_ids_a_mask_byte_and_four_for_each_optional_value():
    assert PLAIN.row_bytes() == 3 * 8 * 1 + 1
    assert PLAIN.select_layers(()).row_bytes() == 1
    assert FULL.row_bytes() == 1 * 2 * 2 + 1 + 4 + 4


def test_empty_memory_is_what_a_trace_of_the_format_holds():
    trace = RoutingTrace(
        topk_indices=[[[299, 0]], [[1, 2]]], layer_numbers=(4,), num_experts=300, token_ids=[1, 2], weight_version=3
    )
    assert TraceFormat.of(trace) == FULL
    for name, memory in FULL.empty(2).items():
        stored = getattr(trace, name)
        assert (memory.dtype, memory.shape) == (stored.dtype, stored.shape)
    assert list(FULL.empty(2)) == ["topk_indices", "replay_mask", "token_ids", "weight_version"]


def test_a_header_is_a_format_with_the_sizes_of_one_trace():
    trace = RoutingTrace(
        topk_indices=[[[0, 1]], [[1, 2]], [[2, 3]]],
        layer_numbers=(4,),
        num_experts=4,
        sequence_lengths=(1, 2),
        sample_ids=("a", "ü"),
    )
    header = TraceHeader.of(trace)
    assert (header.num_tokens, header.sequence_lengths, header.sample_ids) == (3, (1, 2), ("a", "ü"))
    assert header.format == TraceFormat.of(trace) == TraceFormat(layer_numbers=(4,), topk=2, num_experts=4)
    assert type(header.format) is TraceFormat


GOOD = {
    "layer_numbers": [1, 2],
    "topk": 2,
    "num_experts": 4,
    "has_token_ids": False,
    "has_weight_version": False,
    "num_tokens": 3,
    "sequence_lengths": [3],
    "sample_ids": ["a"],
}
REFUSED = [
    ({"topk": 0}, r"topk=0 must lie in 1\.\.num_experts=4"),
    ({"topk": 5}, r"topk=5 must lie in 1\.\.num_experts=4"),
    ({"topk": True}, "topk=True must be an integer"),
    ({"num_experts": 32769}, "num_experts=32769"),
    ({"layer_numbers": [0]}, "must increase from 1"),
    ({"layer_numbers": [1, 1]}, "must increase"),
    ({"layer_numbers": "12"}, "layer_numbers='12' must be a list"),
    ({"layer_numbers": [2**63]}, r"must be an integer in -9223372036854775807\.\.9223372036854775807"),
    ({"has_token_ids": 1}, "has_token_ids=1 must be true or false"),
    ({"has_weight_version": None}, "has_weight_version=None must be true or false"),
    ({"num_tokens": -1, "sequence_lengths": None, "sample_ids": None}, "num_tokens=-1"),
    ({"num_tokens": 2**63, "sequence_lengths": None, "sample_ids": None}, "num_tokens=9223372036854775808"),
    ({"num_tokens": 4}, r"\[3\] add up to 3, the trace has 4 tokens"),
    ({"sequence_lengths": [4, -1], "sample_ids": None}, "add up to 3"),
    ({"sequence_lengths": [1, 2]}, "sample_ids names 1 samples, sequence_lengths 2"),
    ({"sample_ids": [1]}, "must be a list of strings"),
    ({"sample_ids": "a"}, "sample_ids='a' must be a list"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_what_no_trace_can_be_is_refused(changes, message):
    TraceHeader.from_json(GOOD)
    with pytest.raises(TraceError, match=message):
        TraceHeader.from_json(GOOD | changes)


@pytest.mark.parametrize("name", [name for name in GOOD if name not in ("sequence_lengths", "sample_ids")])
def test_a_missing_entry_is_refused(name):
    with pytest.raises(TraceError, match=name):
        TraceHeader.from_json({key: value for key, value in GOOD.items() if key != name})


def test_a_part_of_the_layers_has_the_same_format_otherwise():
    part = PLAIN.select_layers((2, 5))
    assert (part.layer_numbers, part.topk, part.num_experts) == ((2, 5), 8, 128)
    with pytest.raises(TraceError, match=r"no layer_number 4; there are \[2, 3, 5\]"):
        PLAIN.select_layers((2, 4))
