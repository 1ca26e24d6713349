"""Run as a script with TRITON_INTERPRET=1: what the Triton kernels make of every case, pickled to the given file.

Triton reads that variable when it is imported, so the kernels are interpreted in a process of their own.
"""

import sys
from functools import partial

import torch

from megatron_router_replay.fused import route
from tests.unit.fused.cases import MODES, SHAPES, inputs, outcome

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
CASES = [(mode, shape, "fp32") for mode in MODES for shape in SHAPES]
CASES += [(mode, "64x32x4", dtype) for mode in MODES for dtype in ("fp16", "bf16")]
WRONG_ROWS = torch.tensor([[0, 1], [2, 2], [3, 9], [-1, 4]], dtype=torch.int16)


def main(path: str) -> None:
    cases = {}
    for mode, shape, dtype in CASES:
        logits, topk_indices, weights = inputs(*SHAPES[shape], DTYPES[dtype])
        function = partial(route, topk_indices=topk_indices, backend="triton", **MODES[mode])
        cases[mode, shape, dtype] = outcome(function, logits, weights)
    leaf = torch.ones(4, 8, requires_grad=True)
    probs, _ = route(leaf, WRONG_ROWS, backend="triton")
    probs.backward(torch.arange(32.0).view(8, 4).t())
    empty = route(torch.zeros(0, 8), torch.zeros(0, 2, dtype=torch.uint8), backend="triton")
    torch.save({"cases": cases, "wrong rows": probs.detach(), "empty": empty, "strided": leaf.grad}, path)


if __name__ == "__main__":
    main(sys.argv[1])
