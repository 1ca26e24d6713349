"""Multimodal models around a real GPTModel, shaped like those of mbridge, Megatron-Bridge, mcore-bridge and ROLL."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_router_replay.layout.split import split_context_parallel
from megatron_router_replay.testing import ParallelSizes

IMAGE = 7
"""The token that stands for an embedding of an image."""

LAYOUTS: list[dict[str, int]] = [
    {},
    {"tp_size": 2},
    {"cp_size": 2},
    {"pp_size": 2},
    {"tp_size": 2, "pp_size": 2},
    {"tp_size": 2, "cp_size": 2},
]


def embed(language_model: Any, input_ids: Tensor, image: Tensor) -> Tensor:
    """Embeddings [b, s, h] of whole sequences, with images merged in; the embedding does not scatter them."""
    embedding = language_model.embedding
    for module in (embedding, embedding.word_embeddings):
        for name in ("scatter_to_sequence_parallel", "reduce_scatter_embeddings"):
            if hasattr(module, name):
                setattr(module, name, False)
    hidden = embedding(input_ids=input_ids, position_ids=None).transpose(0, 1)
    return torch.where((input_ids == IMAGE).unsqueeze(-1), hidden + image, hidden)


def arrange(values: Tensor, mask: Tensor | None, packed: Any) -> Tensor:
    """Pack values [b, s, ...] by a mask if there are both, and take this context-parallel rank's part."""
    bounds = (
        None
        if packed is None
        else packed.cu_seqlens_q
        if packed.cu_seqlens_q_padded is None
        else packed.cu_seqlens_q_padded
    )
    if mask is not None and bounds is not None:
        row = values.new_zeros(1, int(bounds[-1]), *values.shape[2:])
        for number, begin in enumerate(bounds[:-1].tolist()):
            kept = values[number, mask[number].bool()]
            row[0, begin : begin + len(kept)] = kept
        values = row
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    return split_context_parallel(values, cp_rank=rank, cp_size=size, cu_seqlens_padded=bounds)


def scattered(hidden: Tensor, config: Any) -> Tensor:
    """[b, s, h] -> [s, b, h] as layers get it."""
    hidden = hidden.transpose(0, 1).contiguous()
    return tensor_parallel.scatter_to_sequence_parallel_region(hidden) if config.sequence_parallel else hidden


class SmallVLM(MegatronModule):
    """A wrapper. Its language model gets no ids ("mbridge"), packed ids ("Megatron-Bridge") or whole ids ("mcore-bridge")."""

    def __init__(self, language_model: Any, kind: str) -> None:
        super().__init__(language_model.config)
        self.language_model, self.kind = language_model, kind
        self.pre_process, self.post_process = language_model.pre_process, language_model.post_process
        self.image = torch.nn.Parameter(torch.full((language_model.config.hidden_size,), 0.25))
        self.vp_stage, self.model_type = language_model.vp_stage, language_model.model_type
        self.share_embeddings_and_output_weights = False

    def set_input_tensor(self, input_tensor: Any) -> None:
        self.language_model.set_input_tensor(input_tensor)

    def forward(
        self, input_ids: Tensor, position_ids: Any = None, attention_mask: Any = None, packed_seq_params: Any = None
    ) -> Tensor:
        mask, hidden, ids = attention_mask, None, None
        if self.pre_process:
            hidden = scattered(
                arrange(embed(self.language_model, input_ids, self.image), mask, packed_seq_params), self.config
            )
        if self.kind == "Megatron-Bridge":
            ids = arrange(input_ids, mask, packed_seq_params)
        elif self.kind == "mcore-bridge":
            ids = input_ids
        output: Tensor = self.language_model(
            input_ids=ids,
            position_ids=None,
            attention_mask=None,
            decoder_input=hidden,
            packed_seq_params=packed_seq_params,
        )
        return output


class SelfPacking(GPTModel):
    """As ROLL's: a GPTModel whose own forward packs its rows and splits them."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, position_ids: Any = None, attention_mask: Any = None, packed_seq_params: Any = None
    ) -> Tensor:
        hidden = None
        if self.pre_process:
            image = torch.full((self.config.hidden_size,), 0.25)
            hidden = scattered(arrange(embed(self, input_ids, image), attention_mask, packed_seq_params), self.config)
        output: Tensor = super().forward(
            input_ids=input_ids,
            position_ids=None,
            attention_mask=None,
            decoder_input=hidden,
            packed_seq_params=packed_seq_params,
        )
        return output


def small_vlms(chunks: list[Any], kind: str) -> list[Any]:
    """Return the chunks of a GPTModel as those of a multimodal model of this kind."""
    if kind != "ROLL":
        return [SmallVLM(chunk, kind) for chunk in chunks]
    for chunk in chunks:
        chunk.__class__ = SelfPacking
    return chunks


def alignment(layout: ParallelSizes) -> int:
    """The multiple to which such models fill each packed sequence."""
    return layout.tp_size * (2 * layout.cp_size if layout.cp_size > 1 else 1)
