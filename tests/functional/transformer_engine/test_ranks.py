"""Models of Transformer Engine's layers on several ranks."""

from typing import Any

import pytest

from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import FULL, MOE
from tests.functional.transformer_engine.cases import NON_REENTRANT, TeCase, check
from tests.functional.transformer_engine.test_models import TE

pytestmark = pytest.mark.slow

TP2, PP2, EP2 = ParallelSizes(tp_size=2, expert_tp_size=2), ParallelSizes(pp_size=2), ParallelSizes(ep_size=2)
TP2_EP2 = ParallelSizes(tp_size=2, ep_size=2)
VPP2 = ParallelSizes(pp_size=2, vp_size=2)
ALLGATHER: dict[str, Any] = {"moe_token_dispatcher_type": "allgather"}

ON_TWO_RANKS = {
    "tp2, full": TeCase(layout=TP2, config=FULL),
    "tp2, te full": TeCase(layout=TP2, config={**TE, **FULL}),
    "tp2, te moe, non-reentrant": TeCase(layout=TP2, config={**TE, **MOE}, checkpoint=NON_REENTRANT),
    "tp2, packed, te full": TeCase(layout=TP2, config={**TE, **FULL}, packed=True),
    "tp2 ep2, te moe": TeCase(layout=TP2_EP2, config={**TE, **MOE}),
    "tp2 ep2, te moe, non-reentrant": TeCase(layout=TP2_EP2, config={**TE, **MOE}, checkpoint=NON_REENTRANT),
    "tp2 ep2, te full, allgather": TeCase(layout=TP2_EP2, config={**TE, **FULL, **ALLGATHER}),
    "ep2, te full": TeCase(layout=EP2, config={**TE, **FULL}),
    "ep2, te moe, allgather": TeCase(layout=EP2, config={**TE, **MOE, **ALLGATHER}),
    "pp2, te full": TeCase(layout=PP2, config={**TE, **FULL}, num_microbatches=4),
    "pp2, te moe, non-reentrant": TeCase(
        layout=PP2, config={**TE, **MOE}, checkpoint=NON_REENTRANT, num_microbatches=4
    ),
    "pp2 vpp2, te full": TeCase(layout=VPP2, config={"num_layers": 4, **TE, **FULL}, num_microbatches=4),
    "pp2 vpp2, te moe, non-reentrant": TeCase(
        layout=VPP2, config={"num_layers": 4, **TE, **MOE}, checkpoint=NON_REENTRANT, num_microbatches=4
    ),
    # Megatron-Core distributes none with MoE: it wants sequence parallelism with tensor parallelism.
    "saved activations distributed, te full": TeCase(
        layout=EP2,
        config={**TE, **FULL},
        checkpoint={"distribute_saved_activations": True},
        same_data=True,
    ),
}


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks(name, on_ranks, count):
    count(*on_ranks(2, check, ON_TWO_RANKS[name]))


def test_four_ranks(on_ranks, count):
    layout = ParallelSizes(tp_size=2, pp_size=2, vp_size=2, ep_size=2)
    case = TeCase(layout=layout, config={"num_layers": 4, **TE, **FULL}, num_microbatches=4)
    count(*on_ranks(4, check, case))
