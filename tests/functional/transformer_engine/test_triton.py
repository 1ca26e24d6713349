"""Transformer Engine's own triton kernels, which permute tokens by experts; triton runs them as Python."""

import os
from typing import Any

import pytest

from tests.functional.mcore.cases import FULL, MOE
from tests.functional.transformer_engine.cases import TeCase, check
from tests.functional.transformer_engine.test_models import TE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="takes minutes: TRITON_INTERPRET=1"),
]

FUSED = {"moe_permute_fusion": True}
KERNELS = frozenset({"triton _permute_kernel", "triton _unpermute_kernel"})
SMALL: dict[str, Any] = {"num_microbatches": 1, "batch_size": 1, "kernels": KERNELS}
CASES = {
    "full": TeCase(config={**FUSED, **FULL}, **SMALL),
    "packed, te moe": TeCase(config={**FUSED, **TE, **MOE}, packed=True, **SMALL),
    "allgather, full": TeCase(config={**FUSED, "moe_token_dispatcher_type": "allgather", **FULL}, **SMALL),
}


@pytest.mark.parametrize("name", CASES)
def test_fused_permutation(name, megatron, count):
    count(check(CASES[name]))
