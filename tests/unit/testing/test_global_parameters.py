import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_router_replay.testing.global_parameters import merge_parameter, split_parameter
from tests.support.gradients import merge_by_name


def test_each_kind_of_weight_is_split_as_megatron_does():
    fc1 = torch.tensor([[1], [2], [3], [4], [11], [12], [13], [14]])  # the gate, then the up projection
    assert split_parameter(fc1, 0, tp_rank=1, tp_size=2, gated=True).flatten().tolist() == [3, 4, 13, 14]
    assert split_parameter(fc1, 0, tp_rank=1, tp_size=2).flatten().tolist() == [11, 12, 13, 14]
    fc2 = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert split_parameter(fc2, 1, tp_rank=0, tp_size=2).tolist() == [[1, 2], [5, 6]]
    assert split_parameter(fc2, None, tp_rank=1, tp_size=2) is fc2


@given(axis=st.sampled_from([0, 1, None]), tp_size=st.sampled_from([1, 2, 4]), gated=st.booleans())
def test_merging_all_shards_gives_the_parameter_back(axis, tp_size, gated):
    whole = torch.arange(16 * 8).view(16, 8)
    shards = [split_parameter(whole, axis, tp_rank=rank, tp_size=tp_size, gated=gated) for rank in range(tp_size)]
    assert torch.equal(merge_parameter(shards, axis, gated=gated), whole)


def test_ranks_that_disagree_on_a_tensor_raise():
    ones = torch.ones(2)
    merged = merge_by_name([{"a": ones}, {"a": ones, "b": 2 * ones}])
    assert merged["b"].tolist() == [2, 2]
    with pytest.raises(ValueError, match="disagree on a by 1"):
        merge_by_name([{"a": ones}, {"a": 2 * ones}])
