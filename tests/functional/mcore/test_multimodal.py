"""Sessions on multimodal models, on every layout: each router gets the rows of the tokens that the outer model got."""

from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.cases import DRAWN, FULL, Case, random_routes, same, watched, wrong_replays
from tests.functional.mcore.small_vlm import IMAGE, LAYOUTS, alignment, arrange, small_vlms
from tests.functional.mcore.test_follow import rows_of, samples
from tests.support.every_pair import every_pair
from tests.support.gradients import gradients
from tests.support.packing import pack_sequences, pad_sequences
from tests.support.schedule import run_schedule
from tests.support.tiny_gpt import build_tiny_gpt, tiny_gpt_config

GROUPS = ([4, 0, 2], [1, 3, 5], [2, 5, 0])
LENGTH = 16


def with_images() -> list[Tensor]:
    """The samples of `test_follow`, some of whose tokens are images."""
    drawn = samples()
    drawn[0][5:8] = drawn[4][6:12] = IMAGE
    return drawn


def the_trace() -> mrr.RoutingTrace:
    lengths = [len(sample) for sample in samples()]
    routes = random_routes(sum(lengths), 4).split([*lengths])
    routes[1][:4], routes[5][:4] = routes[0][:4], routes[2][:4]
    sizes = {"num_experts": 8, "layer_numbers": range(1, 5)}
    return mrr.RoutingTrace.from_samples(with_images(), list(routes), **sizes, last_token="unrouted")


def batch(numbers: list[int], kind: str, layout: ParallelSizes) -> dict[str, Any]:
    """One micro-batch as a trainer gives it, and the rows of the hidden states on this rank, for the oracle alone."""
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens, rows = [with_images()[n] for n in numbers], [rows_of(n) for n in numbers]
    side = "left" if "left" in kind else "right"
    ids, at = (pad_sequences(values, length=LENGTH, fill=fill, side=side) for values, fill in ((tokens, 0), (rows, -1)))
    mask = pad_sequences([torch.ones_like(each) for each in tokens], length=LENGTH, fill=0, side=side)
    packed = None
    if "packed" in kind:
        row, real, bounds = pack_sequences(tokens, fill=0, multiple=alignment(layout))
        longest = int(bounds.diff().max())
        lengths = {"cu_seqlens_q": real, "cu_seqlens_q_padded": bounds} if "known" in kind else {"cu_seqlens_q": bounds}
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest, **lengths
        )
        at = pack_sequences(rows, fill=-1, multiple=alignment(layout))[0]
        if "outside" in kind:
            ids, mask = row, None
    return {
        "tokens": ids,
        "mask": mask if "mask" in kind or "inside" in kind else None,
        "packed": packed,
        "rows": arrange(at, None, packed),
    }


def forward_step(iterator: Any, model: Any) -> Any:
    microbatch = next(iterator)
    output = model(microbatch["tokens"], None, microbatch["mask"], packed_seq_params=microbatch["packed"])
    return output, lambda logits: (loss := logits.float().square().mean(), loss.detach())


def build(layout: ParallelSizes, wrapper: str, **config: Any) -> list[Any]:
    layout.initialize()
    chunks = build_tiny_gpt(tiny_gpt_config(layout, variable_seq_lengths=True, **config), layout, small_attention=True)
    return small_vlms(chunks, wrapper)


def follow(layout: ParallelSizes, wrapper: str, kind: str) -> int:
    """Replay, record and freeze on a schedule; count wrong decisions of all forwards and recomputes."""
    chunks = build(layout, wrapper, **FULL)
    # Interleaved stages take an even number of them.
    groups = [*GROUPS, [0, 4]] if layout.vp_size else GROUPS
    microbatches = [batch(group, kind, layout) for group in groups]
    trace, case = the_trace(), Case(layout=layout)

    def run() -> Any:
        return run_schedule(chunks, layout, microbatches, forward_step=forward_step), gradients(chunks)

    options: dict[str, Any] = {} if "known" in kind or "mask" in kind else {"padding_token_ids": [0]}
    with (
        watched(chunks) as seen,
        mrr.audit(chunks, trace, **options) as findings,
        mrr.replay(chunks, trace, verify=True, **options, **DRAWN),
    ):
        run()
    wrong = wrong_replays(case, seen, trace, microbatches)
    assert seen["recompute"]
    assert (findings.wrong, findings.recomputed_wrong, findings.not_found) == (0, 0, 0)
    with mrr.audit(chunks, trace, **options) as of_live:
        live = run()
    assert of_live.wrong > of_live.compared / 2 == findings.compared / 2 > 0
    assert of_live.recomputed_wrong == of_live.wrong
    with mrr.record(chunks, **options) as recording:
        assert same(run(), live)
    recorded = recording.gather()
    assert recorded.token_ids is not None
    at = [token for group in groups for number in group for token in with_images()[number].tolist()]
    assert recorded.token_ids.tolist() == at
    with mrr.replay(chunks, recorded, verify=True, **options) as session:
        assert same(run(), live)
    assert session.report.rows_live == 0
    with mrr.freeze_recompute(chunks):
        assert same(run(), live)
    return wrong


CASES = [
    pytest.param({}, "mbridge", "packed inside, left", marks=pytest.mark.version),
    pytest.param({}, "ROLL", "packed inside, left"),
    pytest.param({"tp_size": 2}, "mbridge", "packed inside"),
    pytest.param({"cp_size": 2}, "mcore-bridge", "packed outside, known", marks=pytest.mark.version),
    pytest.param({"cp_size": 2}, "ROLL", "padded, mask"),
    pytest.param({"pp_size": 2}, "Megatron-Bridge", "packed inside, left"),
    pytest.param({"pp_size": 2, "vp_size": 2}, "mbridge", "packed inside", marks=pytest.mark.slow),
]
KINDS = [
    "padded",
    "padded, left, mask",
    "packed inside",
    "packed inside, left",
    "packed outside",
    "packed outside, known",
]
EVERY = [
    (sizes, wrapper, kind)
    for sizes in LAYOUTS
    for wrapper in ("mbridge", "Megatron-Bridge", "mcore-bridge", "ROLL")
    for kind in KINDS
    if not (wrapper == "mcore-bridge" and "inside" in kind)
]
ALL = [pytest.param(*case, marks=pytest.mark.slow) for case in every_pair(EVERY)]
"""Each layout with each wrapper and each kind of batch, each wrapper with each kind; with CI_ALL=1 all three together."""


@pytest.mark.parametrize(("sizes", "wrapper", "kind"), CASES + ALL, ids=str)
def test_every_router_gets_the_rows_of_the_tokens_of_the_model_around_it(
    sizes: dict[str, int], wrapper: str, kind: str, on_ranks: Any
) -> None:
    layout = ParallelSizes(**sizes)
    assert on_ranks(layout.world_size, follow, layout, wrapper, kind) == [0] * layout.world_size
