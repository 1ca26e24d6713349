"""Samples of three lengths, and the containers of trainers."""

import torch

LENGTHS = (5, 1, 8)
ROWS = [[0, 1, 2, 3, 4], [5], [6, 7, 8, 9, 10, 11, 12, 13]]


def token_ids():
    return [torch.arange(100, 105), torch.arange(200, 201), torch.arange(300, 308)]


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
