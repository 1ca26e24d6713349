import torch

from benchmarks.memory import Held


def test_a_storage_is_counted_once_however_many_views_it_has():
    held = Held()
    before = held.count()
    whole = torch.zeros(1000, dtype=torch.uint8)
    views = [whole[:10], whole[10:]]
    assert held.count() - before == 1000
    held.save(views[0])
    assert held.count() - before == 1000


def test_what_only_autograd_holds_is_counted():
    held = Held()
    before = held.count()
    weight = torch.ones(10, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(held.save, lambda tensor: tensor):
        loss = (weight.exp() * 1.0).sum()  # exp keeps its result, 40 bytes
    assert held.count() - before == 40 + 40 + 4
    del loss


def test_a_tensor_without_a_storage_is_left_out():
    sparse = torch.eye(3).to_sparse()
    assert Held().count() > 0
    del sparse
