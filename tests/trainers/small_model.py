"""The tiny model that each trainer trains here, wrapped as it wraps its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from megatron_router_replay.testing import ParallelSizes
from tests.functional.mcore.real_vlms import draw_parameters
from tests.support.families import latent_projections
from tests.support.tiny_gpt import build_tiny_gpt, tiny_gpt_config
from tests.support.tiny_hybrid import build_tiny_hybrid
from tests.trainers.oracle import EXPERTS, LAYERS, TOPK, VOCAB


def build(
    layout: ParallelSizes, *, pattern: str | None = None, vlm: Callable[..., list[Any]] | None = None, **options: Any
) -> list[Any]:
    """Return this rank's chunks, in Megatron's DistributedDataParallel; layer 1 of 4 is dense.

    Args:
        pattern: of the 4 layers of a HybridModel; see `build_tiny_hybrid`.
        vlm: of `vlms`, which returns the chunks of a multimodal model; gets the config and the layout.
    """
    from megatron.core.enums import ModelType
    from megatron.core.transformer.transformer_config import TransformerConfig

    layout.initialize()
    options = {"variable_seq_lengths": layout.pp_size > 1, "moe_layer_freq": [0, 1, 1, 1], **options}
    if not hasattr(TransformerConfig, "moe_enable_routing_replay") and "moe_enable_routing_replay" in options:
        options["enable_routing_replay"] = options.pop(
            "moe_enable_routing_replay"
        )  # its name in the first builds of 0.16
    config = tiny_gpt_config(
        layout,
        num_layers=LAYERS,
        num_moe_experts=EXPERTS,
        moe_router_topk=TOPK,
        **options,
    )
    with latent_projections() if "moe_latent_size" in options else nullcontext():
        if vlm is not None:
            chunks = vlm(config, layout)
            for chunk in chunks:
                chunk.model_type = ModelType.encoder_or_decoder  # as Megatron-Core's get_model sets it
            draw_parameters(chunks)
        elif pattern is None:
            chunks = build_tiny_gpt(config, layout, vocab_size=VOCAB, small_attention=True)
        else:
            chunks = build_tiny_hybrid(config, layout, pattern, vocab_size=VOCAB, small_attention=True)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp = DistributedDataParallelConfig(overlap_grad_reduce=False, use_distributed_optimizer=False)
    return [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in chunks]


def without_attention(chunks: list[Any]) -> None:
    """Let attention return its input: Megatron's own splits sequences zigzag, and cannot take a contiguous split."""
    from megatron.core.transformer.attention import SelfAttention

    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, SelfAttention):
            module.forward = lambda hidden_states, *_, **__: (hidden_states, None)


def packed_seq_params(**given: Any) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(**{name: value for name, value in given.items() if hasattr(PackedSeqParams, name)})


class NoOptimizer:
    """Takes every step and changes nothing: the weights of the next pass are those of this one."""

    def __init__(self) -> None:
        self.param_groups: list[Any] = []
        self.chained_optimizers: list[Any] = []

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        pass

    def scale_loss(self, loss: Any) -> Any:
        return loss

    def step(self, *args: Any, **kwargs: Any) -> tuple[bool, float, int]:
        return True, 0.0, 0

    def get_lr(self, group: Any) -> float:
        return 0.0
