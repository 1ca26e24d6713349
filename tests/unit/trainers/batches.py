"""A batch as an engine leaves it, sample by sample, and the same in the containers of trainers."""

import numpy as np
import torch

from megatron_router_replay.engines import ModelRoutingInfo

INFO = ModelRoutingInfo(num_layers=10, moe_layer_numbers=tuple(range(2, 11)), num_experts=16, topk=2)
"""Layer 1 is dense; nine layers of 7.9 bits a row, enough to tell filler."""

LENGTHS = (5, 1, 8)
ROWS = [[0, 1, 2, 3, 4], [5], [6, 7, 8, 9, 10, 11, 12, 13]]


def token_ids():
    return [torch.arange(100, 105), torch.arange(200, 201), torch.arange(300, 308)]


def engine_routes(*, seed=0, dtype=torch.int64, moe_only=False):
    """[T - 1, 10, 2] of each sample, layer 1 zeros; or its nine MoE layers alone."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for length in LENGTHS:
        routes = torch.rand(length - 1, 10, 16, generator=generator).argsort(dim=2)[:, :, :2]
        routes[:, 0] = 0
        samples.append((routes[:, 1:] if moe_only else routes).to(dtype))
    return samples


def with_row(samples, fill):
    """Each sample with one row more, of this filler."""
    return [torch.cat([part, torch.full((1, *part.shape[1:]), fill, dtype=part.dtype)]) for part in samples]


def nested(parts, layout=torch.jagged):
    return torch.nested.as_nested_tensor(list(parts), layout=layout)


def padded(parts, *, size=9, side="right", fill=0):
    """[B, size, ...], each part on its side."""
    batch = torch.full((len(parts), size, *parts[0].shape[1:]), fill, dtype=parts[0].dtype)
    for row, part in zip(batch, parts):
        start = size - len(part) if side == "left" else 0
        row[start : start + len(part)] = part
    return batch


def attention_mask(*, size=9, side="right"):
    return padded([torch.ones(length, dtype=torch.int64) for length in LENGTHS], size=size, side=side)


def assert_exact(trace, samples):
    """The trace has these routes in its MoE layers, row by row, the last token of each sample live."""
    assert trace.layer_numbers == INFO.moe_layer_numbers
    assert trace.sequence_lengths == LENGTHS
    assert trace.topk_indices.dtype is torch.uint8
    for rows, part in zip(ROWS, samples):
        moe = part if part.shape[1] == 9 else part[:, 1:]
        got = trace.topk_indices[rows[0] : rows[-1]]
        assert np.array_equal(got.numpy(), np.asarray(moe))
        assert trace.replay_mask[rows].tolist() == [True] * len(moe) + [False]
