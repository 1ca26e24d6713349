"""Where the samples of a batch begin and end, and the pieces of neighbouring rows that they are cut into."""

from __future__ import annotations

import torch
from torch import Tensor

_PIECE_ROWS = 64  # short enough that a fault in half a sample fills a piece, long enough that chance does not
_MAX_PIECES = 4096  # bounds the counts by piece and layer: of a longer trace, pieces are longer
_MAX_SAMPLES = 1 << 14  # each sample has a piece of its own at least


class Samples:
    """Where samples begin and end; without sequence lengths, all rows are one sample that nobody named.

    Args:
        lengths: tokens of each sample, or None.
        num_rows: rows in all.
    """

    def __init__(self, lengths: tuple[int, ...] | None, num_rows: int) -> None:
        self.lengths, self.num_rows = lengths, num_rows
        self.ends = torch.tensor(lengths or (), dtype=torch.int64).cumsum(0)
        self.starts = torch.cat([torch.zeros(1, dtype=torch.int64), self.ends])

    @property
    def known(self) -> bool:
        return self.lengths is not None

    @property
    def count(self) -> int:
        return len(self.lengths or ())

    def places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's position in its sample, and the sample; rows behind the last sample count as one more."""
        if self.lengths is None:
            return rows, torch.zeros_like(rows)
        sample = torch.searchsorted(self.ends, rows, right=True)
        return rows - self.starts[sample], sample

    def bounds(self, sample: int) -> tuple[int, int]:
        """Return the first row of a sample and the row behind its last."""
        return int(self.starts[sample]), int(self.ends[sample])

    def piece_starts(self) -> Tensor:
        """Return the first row of each piece, [pieces] int64: pieces end with samples and have about the same length."""
        size = max(_PIECE_ROWS, -(-self.num_rows // _MAX_PIECES))
        lengths = list(self.lengths) if self.lengths is not None and self.count <= _MAX_SAMPLES else []
        # Rows behind the last sample, or of too many samples to cut at each, are cut as one more sample.
        if sum(lengths) < self.num_rows:
            lengths.append(self.num_rows - sum(lengths))
        starts = []
        begin = 0
        for length in lengths:
            pieces = max(1, round(length / size)) if length else 0
            starts += [begin + length * piece // pieces for piece in range(pieces)]
            begin += length
        return torch.tensor(starts, dtype=torch.int64)
