"""What these tests run on every rank: models of Transformer Engine's layers, live, recorded, replayed and frozen."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import megatron_router_replay as mrr
from megatron_router_replay.testing import PackedAttention
from tests.functional.mcore.cases import (
    DRAWN,
    Case,
    Watched,
    add_noise_in_recompute,
    flips,
    moe_routers,
    random_routes,
    same,
    watched,
    wrong_replays,
)
from tests.support import soft_te
from tests.support.schedule import random_microbatches, run_schedule
from tests.support.tiny_gpt import tiny_gpt_config

te_checkpoints = sys.modules["transformer_engine.pytorch.distributed"]

PAD, VOCAB = 319, 320
NON_REENTRANT = {"use_reentrant": False}


@dataclass(frozen=True, kw_only=True)
class TeCase(Case):
    """A step of a GPTModel of Transformer Engine's layers, or of a HybridModel.

    Args:
        recomputes: how many recomputes this rank's routers have for each forward; None: not counted.
        packed: one row of three sequences, by `PackedAttention`: Transformer Engine's unfused attention takes no packed rows.
        checkpoint: further arguments of Transformer Engine's checkpoint, which Megatron-Core leaves at their defaults.
        nested: kinds of two checkpoints around each decoder layer, the outer first; see `LAYER_CHECKPOINTS`.
        quantized: numbers are rounded to FP8, or pass a custom recipe's quantizers.
        kernels: names of kernels that must run.
        te_rng_tracker: Transformer Engine's random states, with dropout, so that a recompute needs them.
        pattern: of a HybridModel's layers.
        same_data: ranks have equal micro-batches.
    """

    num_microbatches: int = 2
    recomputes: float | None = 1.0
    packed: bool = False
    checkpoint: dict[str, Any] = field(default_factory=dict)
    nested: tuple[str, str] | None = None
    quantized: bool = False
    kernels: frozenset[str] = frozenset()
    te_rng_tracker: bool = False
    pattern: str | None = None
    same_data: bool = False


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Of one case on one rank: of a live step, but for `planted` and `te_checkpoints`.

    Args:
        forwards, recomputes: calls of routers.
        decisions: of the recomputes.
        planted: recomputed decisions that flip without the library; None: the step raises, or is not run.
        te_checkpoints: runs of a function that Transformer Engine's checkpoint made, in all steps of the case.
    """

    forwards: int
    recomputes: int
    decisions: int
    planted: int | None
    te_checkpoints: int


def build(case: TeCase) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return this rank's chunks, in training mode, and its micro-batches."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnBackend

    case.layout.initialize()
    model_parallel_cuda_manual_seed(1234, te_rng_tracker=case.te_rng_tracker, force_reset_rng=True)
    torch.manual_seed(1)
    options = {"num_layers": 2, "moe_grouped_gemm": True, "deterministic_mode": False, **case.config}
    config = tiny_gpt_config(case.layout, attention_backend=AttnBackend.unfused, **options)
    chunks = [_build_chunk(case, config, stage) for stage in range(case.layout.num_chunks)]
    if case.nested is not None:
        outer, inner = (LAYER_CHECKPOINTS[name] for name in case.nested)
        for layer in chunks[0].decoder.layers:
            layer.forward = partial(_checkpointed, layer.forward, outer, inner)
    return [chunk.train() for chunk in chunks], _microbatches(case)


def _checkpointed(forward: Any, outer: Any, inner: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a decoder layer inside two checkpoints of its hidden states."""

    def run(hidden: Tensor) -> Tensor:
        output: Tensor = forward(hidden, *args, **kwargs)[0]
        return output

    return outer(lambda hidden: inner(run, hidden), hidden_states), None


def _of_transformer_engine(use_reentrant: bool, function: Any, hidden: Tensor) -> Any:
    tracker = tensor_parallel.random.get_cuda_rng_tracker
    return te_checkpoints.checkpoint(function, hidden, use_reentrant=use_reentrant, get_rng_state_tracker=tracker)


LAYER_CHECKPOINTS: dict[str, Any] = {
    "none": lambda function, hidden: function(hidden),
    "te reentrant": partial(_of_transformer_engine, True),
    "te non-reentrant": partial(_of_transformer_engine, False),
    "torch reentrant": partial(torch_checkpoint, use_reentrant=True),
    "torch non-reentrant": partial(torch_checkpoint, use_reentrant=False),
    "megatron": lambda function, hidden: tensor_parallel.checkpoint(function, False, hidden),
}


def high_precision(role: Any = None) -> Any:
    """Return a quantizer that rounds nothing: `fp8_recipe="custom"` runs all of Transformer Engine's Python for FP8."""
    from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

    return IdentityQuantizer()


def _build_chunk(case: TeCase, config: Any, stage: int) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    pp_rank, last = parallel_state.get_pipeline_model_parallel_rank(), case.layout.pp_size - 1
    options: dict[str, Any] = {
        "config": config,
        "vocab_size": VOCAB,
        "max_sequence_length": 64,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
        "pre_process": pp_rank == 0 and stage == 0,
        "post_process": pp_rank == last and stage == case.layout.num_chunks - 1,
    }
    if case.pattern is not None:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        return HybridModel(hybrid_stack_spec=hybrid_stack_spec, hybrid_layer_pattern=case.pattern, **options)
    vp_stage = None if case.layout.vp_size is None else stage
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    for layer in spec.layer_specs if case.packed else ():
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
    if config.mtp_num_layers:
        options["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True, vp_stage=vp_stage)
    return GPTModel(transformer_layer_spec=spec, vp_stage=vp_stage, **options)


def _microbatches(case: TeCase) -> list[dict[str, Any]]:
    """Return random micro-batches of this data-parallel rank."""
    from megatron.core import parallel_state

    microbatches = random_microbatches(
        case.num_microbatches,
        batch_size=case.batch_size,
        sequence_length=case.sequence_length,
        vocab_size=PAD,
        seed=0 if case.same_data else parallel_state.get_data_parallel_rank(),
    )
    mask = torch.ones(case.sequence_length, case.sequence_length, dtype=torch.bool).triu(1)
    for microbatch in microbatches:
        microbatch["attention_mask"] = mask.expand(case.batch_size, 1, -1, -1)
        if case.packed:
            _pack(microbatch, case)
    return microbatches


def _pack(microbatch: dict[str, Any], case: TeCase) -> None:
    """Make a micro-batch one row of sequences of unlike lengths."""
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = sample_lengths(case)
    bounds, longest = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), max(lengths)
    for name in ("tokens", "labels", "loss_mask"):
        microbatch[name] = microbatch[name].reshape(1, -1)
    microbatch["position_ids"] = torch.cat([torch.arange(length) for length in lengths]).view(1, -1)
    microbatch["attention_mask"] = None
    ends = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds, "max_seqlen_q": longest, "max_seqlen_kv": longest}
    microbatch["packed_seq_params"] = PackedSeqParams(qkv_format="thd", **ends)


def sample_lengths(case: TeCase) -> list[int]:
    """Return the lengths of the samples of one micro-batch."""
    if not case.packed:
        return [case.sequence_length] * case.batch_size
    total = case.batch_size * case.sequence_length
    return [total // 2 - 1, 3, total - total // 2 - 2]


def add_rows(case: TeCase, microbatches: list[dict[str, Any]], trace: mrr.RoutingTrace) -> None:
    """Put the trace row of each token into `rows`, found by comparing samples one by one."""
    assert trace.token_ids is not None
    assert trace.sequence_lengths is not None
    samples = list(trace.token_ids.long().split([*trace.sequence_lengths]))
    starts = [0, *torch.tensor(trace.sequence_lengths).cumsum(0).tolist()]
    for microbatch in microbatches:
        rows = []
        for tokens in microbatch["tokens"].reshape(-1).split(sample_lengths(case)):
            number = next(n for n, sample in enumerate(samples) if torch.equal(sample, tokens))
            rows.append(starts[number] + torch.arange(len(tokens)))
        microbatch["rows"] = torch.cat(rows).view(microbatch["tokens"].shape)


def step(chunks: list[Any], case: TeCase, microbatches: list[dict[str, Any]]) -> Any:
    """Run one training step from the same random states and FP8 scales; return losses and this rank's gradients."""
    if case.config.get("fp8_recipe") == "delayed":
        for module in (module for chunk in chunks for module in chunk.modules()):
            if hasattr(module, "reset_fp8_meta_tensors"):
                module.reset_fp8_meta_tensors()
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1234, te_rng_tracker=case.te_rng_tracker, force_reset_rng=True)
    losses = run_schedule(chunks, case.layout, microbatches)
    named = [(f"{number}.{name}", p) for number, chunk in enumerate(chunks) for name, p in chunk.named_parameters()]
    return losses, {name: p.grad.clone() for name, p in named if p.grad is not None}


def no_context(*args: Any, **kwargs: Any) -> Any:
    return nullcontext()


@contextmanager
def checkpoints_of(case: TeCase) -> Iterator[Counter[str]]:
    """Let checkpoints be as the case says; yield how often Transformer Engine's ran their function, below our wrappers."""
    runs: Counter[str] = Counter()
    kind = te_checkpoints.activation_recompute_forward
    enter = kind.__enter__

    def counted(self: Any) -> Any:
        runs["recompute" if self.recompute_phase else "forward"] += 1
        return enter(self)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(kind, "__enter__", counted))
        if case.checkpoint:
            # Megatron-Core says False where it distributes nothing.
            def checkpoint(function: Any, *args: Any, real: Any = te_checkpoints.checkpoint, **options: Any) -> Any:
                return real(function, *args, **{**options, **case.checkpoint})

            stack.enter_context(mock.patch.object(te_checkpoints, "checkpoint", checkpoint))
        if not case.quantized:
            for name, module in list(sys.modules.items()):
                if name.startswith("megatron.core") and hasattr(module, "get_fp8_context"):
                    stack.enter_context(mock.patch.object(module, "get_fp8_context", no_context))
        yield runs


def check(case: TeCase) -> Counts:
    """Run a case live, recorded, replayed and frozen; assert what replay promises; then plant a live recompute."""
    with soft_te.on_cpu():
        chunks, microbatches = build(case)
        with checkpoints_of(case) as runs:
            return _check(case, chunks, microbatches, runs)


def _check(case: TeCase, chunks: list[Any], microbatches: list[dict[str, Any]], runs: Counter[str]) -> Counts:
    run = partial(step, chunks, case, microbatches)
    soft_te.calls.clear()
    with watched(chunks) as seen:
        live = run()
    assert case.kernels <= soft_te.calls.keys()
    calls = num_calls(seen)
    assert calls["forward"] == len(moe_routers(chunks)) * case.num_microbatches
    if case.recomputes is not None:
        assert calls["recompute"] == calls["forward"] * case.recomputes
    assert same(live, run()), "two live steps differ, so equal bits would prove nothing"

    with watched(chunks) as seen, mrr.record(chunks, padding_token_ids=[PAD]) as recording:
        recorded = run()
    assert same(live, recorded), "recording changed losses or gradients"
    trace = recording.trace() if case.same_data else recording.gather()
    add_rows(case, microbatches, trace)
    assert num_wrong(case, seen, trace, microbatches) == 0

    soft_te.calls.clear()
    with mrr.replay(chunks, trace, padding_token_ids=[PAD], verify=True):
        replayed = run()
    assert soft_te.calls["fused_topk_with_score_function_fwd"] == 0, "it chooses experts in place of the session"
    assert same(live, replayed), "replaying the routes just recorded changed losses or gradients"

    add_noise_in_recompute(chunks)
    add_noise_in_recompute(chunks, mtp=True)
    drawn = with_drawn_routes(trace)
    replay = mrr.replay(chunks, drawn, padding_token_ids=[PAD], verify=True, **DRAWN)
    with watched(chunks) as seen, watched(chunks, mtp=True) as mtp_seen, replay:
        run()
    assert num_calls(seen) == calls
    assert num_wrong(case, seen, drawn, microbatches) == 0
    assert num_flips(mtp_seen) == 0

    with watched(chunks) as seen, watched(chunks, mtp=True) as mtp_seen, mrr.freeze_recompute(chunks):
        run()
    assert (num_calls(seen), num_flips(seen), num_flips(mtp_seen)) == (calls, 0, 0)

    # A non-reentrant recompute with different experts raises on the rank that finds tensors of different shapes first; the
    # others wait for it in an all-to-all.
    may_hang = dist.get_world_size() > 1 and case.checkpoint == NON_REENTRANT
    planted = None if may_hang else plant(chunks, run)
    assert planted != 0 or not calls["recompute"]
    assert runs or "fp8" not in case.config or case.nested is not None
    decisions = sum(len(each) for maps in seen["recompute"].values() for each in maps)
    return Counts(
        forwards=calls["forward"],
        recomputes=calls["recompute"],
        decisions=decisions,
        planted=planted,
        te_checkpoints=sum(runs.values()),
    )


def plant(chunks: list[Any], run: Any) -> int | None:
    """Return how many recomputed decisions flip without the library; None if the step raises."""
    mrr.uninstall()  # else a recompute of a router that had a session raises
    try:
        with watched(chunks) as seen:
            run()
    except (RuntimeError, AssertionError, IndexError, ValueError):
        return None  # tensors of different experts have different shapes
    return num_flips(seen)


def with_drawn_routes(trace: mrr.RoutingTrace) -> mrr.RoutingTrace:
    """Return a trace of the same samples with routes that no router chose."""
    routes = random_routes(len(trace.topk_indices), len(trace.layer_numbers), 7)
    return replace(trace, topk_indices=routes.to(trace.topk_indices.dtype))


def num_calls(seen: Watched) -> dict[str, int]:
    return {kind: sum(map(len, maps.values())) for kind, maps in seen.items()}


def passes(seen: Watched) -> Iterator[Watched]:
    """Yield the forwards with the first recompute of each, then with the second: nested checkpoints run a layer twice."""
    times = {layer: len(maps) // len(seen["forward"][layer]) for layer, maps in seen["recompute"].items()}
    for number in range(max(times.values(), default=1)):
        recomputed = {layer: maps[number :: times[layer]] for layer, maps in seen["recompute"].items()}
        yield {"forward": seen["forward"], "recompute": recomputed}


def num_flips(seen: Watched) -> int:
    return sum(map(flips, passes(seen)))


def num_wrong(case: TeCase, seen: Watched, trace: mrr.RoutingTrace, microbatches: list[dict[str, Any]]) -> int:
    return sum(wrong_replays(case, each, trace, microbatches) for each in passes(seen))
