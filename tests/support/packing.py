"""Sequences as a padded batch [b, s] or one packed row [1, total]."""

from math import lcm

import torch
from torch.nn.functional import pad


def numbered(lengths):
    """The trace rows of sequences, which follow one another from row 0."""
    return list(torch.arange(sum(lengths)).split(list(lengths)))


def pad_sequences(sequences, *, fill, length=0, side="right"):
    """Every sequence padded to the longest, or to a length."""
    length = max(length, *map(len, sequences))
    left = side == "left"
    rows = [(values, length - len(values)) for values in sequences]
    return torch.stack([pad(values, (size, 0) if left else (0, size), value=fill) for values, size in rows])


def pack_sequences(sequences, *, fill, multiple=1, total=0):
    """One row, each sequence padded to a multiple, the last to `total`; and where they start, unpadded and padded."""
    lengths = [len(sequence) for sequence in sequences]
    padded = [-(-length // multiple) * multiple for length in lengths]
    padded[-1] += max(0, total - sum(padded))
    row = torch.cat([pad(values, (0, size - len(values)), value=fill) for values, size in zip(sequences, padded)])
    unpadded, bounds = (torch.tensor([0, *sizes]).cumsum(0).to(torch.int32) for sizes in (lengths, padded))
    return row.unsqueeze(0), unpadded, bounds


def pack_rows(lengths, *, multiple=1, total_multiple=1):
    total = sum(-(-length // multiple) * multiple for length in lengths)
    both = lcm(multiple, total_multiple)
    return pack_sequences(numbered(lengths), fill=-1, multiple=multiple, total=-(-total // both) * both)
