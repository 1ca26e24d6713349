"""The multimodal models that trainers use, unedited: every decision is the trace's, under each layout."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore import real_vlms
from tests.functional.mcore.cases import DRAWN, FULL, Case, random_routes, same, watched, wrong_replays
from tests.functional.mcore.real_vlms import IMAGE, VISION_START
from tests.functional.mcore.small_vlm import LAYOUTS, alignment, arrange
from tests.functional.mcore.test_follow import rows_of, samples
from tests.support.gradients import gradients
from tests.support.packing import pack_sequences, pad_sequences
from tests.support.schedule import run_schedule

GROUPS = ([4, 0, 2], [1, 4, 5], [2, 5, 0])
LENGTH = 16
PLACES = {0: [5, 7], 4: [6, 8]}
"""Sample -> positions of the token that begins an image; the image has one embedding. Each batch has an even number of
images, because mbridge gathers them over context-parallel ranks, and gloo gathers equal parts."""


def tokens_of(number: int, *, images: bool) -> Tensor:
    tokens = samples()[number].remainder(300) + (samples()[number] > 0)
    for at in PLACES.get(number, []) if images else []:
        tokens[at], tokens[at + 1] = VISION_START, IMAGE
    return tokens


def the_trace(*, images: bool) -> mrr.RoutingTrace:
    tokens = [tokens_of(number, images=images) for number in range(6)]
    routes = random_routes(sum(map(len, tokens)), 4).split([*map(len, tokens)])
    routes[1][:4], routes[5][:4] = routes[0][:4], routes[2][:4]
    sizes = {"num_experts": 8, "layer_numbers": range(1, 5)}
    return mrr.RoutingTrace.from_samples(tokens, list(routes), **sizes, last_token="unrouted")


def batch(numbers: list[int], kind: str, packing: str, layout: ParallelSizes, *, images: bool) -> dict[str, Any]:
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens, rows = [tokens_of(n, images=images) for n in numbers], [rows_of(n) for n in numbers]
    ids, at = (pad_sequences(values, length=LENGTH, fill=fill) for values, fill in ((tokens, 0), (rows, -1)))
    mask = pad_sequences([torch.ones_like(each) for each in tokens], length=LENGTH, fill=0).bool()
    packed = None
    if packing != "padded":
        row, _, bounds = pack_sequences(tokens, fill=0, multiple=alignment(layout))
        longest = int(bounds.diff().max())
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=bounds,
            cu_seqlens_kv_padded=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        at = pack_sequences(rows, fill=-1, multiple=alignment(layout))[0]
        if packing == "packed outside":
            ids, mask = row, None
    # Packed outside, positions of three axes come with it; else the model makes them.
    positions = None
    if mask is None:
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        # mbridge takes those of this context-parallel rank, Megatron-Bridge splits them.
        positions = (arrange(positions, None, packed) if kind == "mbridge" else positions).expand(3, 1, -1)
    shown = [10 * n + nth for n in numbers for nth in range(len(PLACES.get(n, [])))] if images else []
    return {
        "tokens": ids,
        "mask": mask,
        "packed": packed,
        "rows": arrange(at, None, packed),
        "positions": positions,
        "pixels": real_vlms.pixels(shown) if shown else {},
    }


def forward_step(iterator: Any, model: Any) -> Any:
    microbatch = next(iterator)
    output = model(
        input_ids=microbatch["tokens"],
        position_ids=microbatch["positions"],
        attention_mask=microbatch["mask"],
        packed_seq_params=microbatch["packed"],
        **microbatch["pixels"],
    )
    return output, lambda logits: (loss := logits.float().square().mean(), loss.detach())


def follow(layout: ParallelSizes, kind: str, packing: str, images: bool) -> tuple[int, float]:
    """Return wrong decisions under replay, and the share of decisions that differ without."""
    chunks = real_vlms.build(kind, layout, **FULL)
    microbatches = [batch(group, kind, packing, layout, images=images) for group in GROUPS]
    trace, case = the_trace(images=images), Case(layout=layout)

    def run() -> Any:
        return run_schedule(chunks, layout, microbatches, forward_step=forward_step), gradients(chunks)

    options: dict[str, Any] = {"padding_token_ids": [0]} if packing == "packed outside" else {}
    with (
        watched(chunks) as seen,
        mrr.audit(chunks, trace, **options) as findings,
        mrr.replay(chunks, trace, verify=True, **options, **DRAWN) as session,
    ):
        run()
    wrong = wrong_replays(case, seen, trace, microbatches)
    assert seen["recompute"]
    assert (findings.wrong, findings.recomputed_wrong, findings.not_found) == (0, 0, 0)
    assert session.report.microbatches == len(GROUPS)
    with mrr.audit(chunks, trace, **options) as of_live:
        live = run()
    with mrr.record(chunks, **options) as recording:
        assert same(run(), live)
    recorded = recording.gather()
    with mrr.replay(chunks, recorded, verify=True, **options) as replayed:
        assert same(run(), live)
    assert replayed.report.rows_live == 0
    with mrr.freeze_recompute(chunks):
        assert same(run(), live)
    return wrong, of_live.wrong / of_live.compared


@pytest.mark.slow
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("images", [False, True], ids=["text", "images"])
@pytest.mark.parametrize("packing", ["padded", "packed inside", "packed outside"])
@pytest.mark.parametrize("kind", list(real_vlms.BUILDERS))
def test_every_decision_is_the_traces(
    kind: str, packing: str, images: bool, sizes: dict[str, int], on_ranks: Any
) -> None:
    if not Path(real_vlms.folder(kind)).is_dir() or not real_vlms.folder(kind):
        pytest.skip(f"needs a checkout, in {real_vlms.DIRS[kind]}")
    if kind != "mbridge" and importlib.util.find_spec("einops") is None:
        pytest.skip("needs einops")
    layout = ParallelSizes(**sizes)
    results = on_ranks(layout.world_size, follow, layout, kind, packing, images)
    assert [wrong for wrong, _ in results] == [0] * layout.world_size
    assert min(share for _, share in results) > 0.5
    print(
        f"\n{kind} | {packing} | {'images' if images else 'text'} | {sizes} | {max(share for _, share in results):.0%}"
    )
