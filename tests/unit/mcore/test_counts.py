"""Counts of values on a GPU are read once, at the end: tensors that say they are there take the same way."""

from itertools import pairwise

import pytest
import torch

from megatron_router_replay.mcore.core.counts import Counts


class OnAGpu(torch.Tensor):
    """Lies on the CPU and says that it does not."""

    device = torch.device("cuda", 0)


def on_a_gpu(values):
    return torch.as_tensor(values).as_subclass(OnAGpu)


def test_what_the_host_knows_is_added_at_once_and_the_rest_when_it_is_read():
    first, second = Counts(), Counts()
    first.add(a=2, b=torch.tensor(True))
    first.add(a=on_a_gpu(5), c=on_a_gpu(True))
    second.add(a=on_a_gpu(False))
    assert (first["a"], first["b"], first["c"], second["a"]) == (2, 1, 0, 0)
    Counts.read([first, second])
    assert (first["a"], first["b"], first["c"], second["a"]) == (7, 1, 1, 0)
    Counts.read([first])
    assert first["a"] == 7, "read once"


def test_many_counts_are_added_up_where_they_are():
    tally, pending = Counts(), [0]
    for number in range(1000):
        tally.add(a=on_a_gpu(number), b=on_a_gpu(number % 2 == 0))
        pending.append(len(tally._pending))
    assert max(pending) < 300
    assert sum(later <= earlier for earlier, later in pairwise(pending)) < 10, "seldom: each time costs launches"
    Counts.read([tally])
    assert (tally["a"], tally["b"]) == (499_500, 500)


def test_counts_that_could_not_be_read_wait_for_the_next_time():
    counts = Counts()
    counts.add(a=torch.ones((), device="meta"))  # has no value
    with pytest.raises(NotImplementedError):
        Counts.read([counts])
    assert [name for name, *_ in counts._pending] == ["a"]
