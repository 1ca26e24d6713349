import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.testing.global_parameters import merge_parameter, random_parameter, split_parameter
from tests.support.gradients import merge_by_name

_NAMES = [
    "embedding.word_embeddings.weight",
    "decoder.layers.3.self_attention.linear_qkv.weight",
    "decoder.layers.3.self_attention.linear_proj.weight",
    "decoder.layers.0.mlp.linear_fc1.weight",
    "decoder.layers.0.mlp.linear_fc2.weight",
    "decoder.layers.2.mlp.experts.local_experts.7.linear_fc1.weight",
    "decoder.layers.2.mlp.shared_experts.linear_fc1.weight",
    "decoder.layers.2.mlp.router.weight",
    "decoder.final_layernorm.weight",
    "mtp.layers.0.eh_proj.weight",
]


def test_each_kind_of_weight_is_split_as_megatron_does():
    fc1 = torch.tensor([[1], [2], [3], [4], [11], [12], [13], [14]])  # the gate, then the up projection
    assert split_parameter("mlp.linear_fc1.weight", fc1, tp_rank=1, tp_size=2).flatten().tolist() == [3, 4, 13, 14]
    plain = split_parameter("mlp.linear_fc1.weight", fc1, tp_rank=1, tp_size=2, gated=False)
    assert plain.flatten().tolist() == [11, 12, 13, 14]
    fc2 = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert split_parameter("mlp.linear_fc2.weight", fc2, tp_rank=0, tp_size=2).tolist() == [[1, 2], [5, 6]]
    assert split_parameter("decoder.layers.0.mlp.router.weight", fc2, tp_rank=1, tp_size=2) is fc2


@given(name=st.sampled_from(_NAMES), tp_size=st.sampled_from([1, 2, 4]), gated=st.booleans())
def test_merging_all_shards_gives_the_parameter_back(name, tp_size, gated):
    whole = torch.arange(16 * 8).view(16, 8)
    shards = [split_parameter(name, whole, tp_rank=r, tp_size=tp_size, gated=gated) for r in range(tp_size)]
    assert torch.equal(merge_parameter(name, shards, gated=gated), whole)


def test_a_parameter_of_unknown_kind_raises():
    with pytest.raises(RouterReplayError, match="conv1d"):
        split_parameter("decoder.layers.0.mixer.conv1d.weight", torch.ones(2), tp_rank=0, tp_size=1)


def test_random_weights_depend_on_name_and_seed_only():
    shape = torch.Size([4, 8])
    torch.manual_seed(1)
    first = random_parameter("a.linear_fc1.weight", shape, seed=0)
    torch.manual_seed(2)
    assert torch.equal(random_parameter("a.linear_fc1.weight", shape, seed=0), first)
    assert not torch.equal(random_parameter("b.linear_fc1.weight", shape, seed=0), first)
    assert not torch.equal(random_parameter("a.linear_fc1.weight", shape, seed=1), first)


def test_ranks_that_disagree_on_a_tensor_raise():
    ones = torch.ones(2)
    merged = merge_by_name([{"a": ones}, {"a": ones, "b": 2 * ones}])
    assert merged["b"].tolist() == [2, 2]
    with pytest.raises(ValueError, match="disagree on a by 1"):
        merge_by_name([{"a": ones}, {"a": 2 * ones}])
