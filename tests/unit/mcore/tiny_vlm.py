"""Multimodal models of real routers, shaped like the wrappers that trainers use; they forward in milliseconds.

A wrapper gets `input_ids`, embeds them, merges images in, arranges the embeddings, and calls its language model with these. A
token `IMAGE` stands for one embedding of an image. Other ways to arrange them are methods that a test replaces.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from torch import Tensor, nn

from tests.unit.mcore.tiny_chunk import HIDDEN, VOCAB, Around, Layer, config, plain

IMAGE = 31
PLACES = 5
"""Embeddings of an image that a model which inserts positions puts in for one token."""


class TinyLanguageModel(LanguageModule):
    """Tokens [b, s], or embeddings [s, b, HIDDEN] -> logits [s, b, VOCAB]."""

    def __init__(self, num_layers: int = 3, seed: int = 0, **options: Any) -> None:
        nn.Module.__init__(self)
        self.config = config(**options)
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator))
        self.layers = nn.ModuleList(Layer(self.config, number + 1, generator) for number in range(num_layers))
        self.around: Around = plain

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input: Tensor | None = None,
        number: int = 0,
        packed_seq_params: Any = None,
    ) -> Tensor:
        if decoder_input is None:
            assert input_ids is not None
            decoder_input = self.embedding[input_ids.t()]
        hidden = torch.cat([decoder_input[..., :-1], torch.full_like(decoder_input[..., -1:], float(number))], dim=-1)
        return self.decode(hidden)

    def decode(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = self.around(layer, hidden)
        return hidden[..., :-1] @ self.embedding[:, :-1].t()


class TinyVLM(nn.Module):
    """As mbridge's Qwen3VLModel: it packs the rows that it gets by its attention_mask where it gets packed_seq_params.

    Args:
        gives_ids: the language model gets the packed ids, too, as Megatron-Bridge's does for multi-token prediction.
    """

    def __init__(self, *, gives_ids: bool = False, **options: Any) -> None:
        super().__init__()
        self.language_model = TinyLanguageModel(**options)
        self.config = self.language_model.config
        self.image = nn.Parameter(torch.randn(HIDDEN, generator=torch.Generator().manual_seed(7)))
        self.gives_ids = gives_ids

    @property
    def routers(self) -> list[Any]:
        return [layer.router for layer in self.language_model.layers]

    def forward(
        self,
        input_ids: Tensor,
        number: int = 0,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        embedded = self.language_model.embedding[input_ids.clamp(min=0)]
        embedded = torch.where((input_ids == IMAGE).unsqueeze(-1), embedded + self.image, embedded)
        hidden, ids = self.arrange(embedded, input_ids, attention_mask, packed_seq_params)
        output: Tensor = self.language_model(
            ids if self.gives_ids else None,
            decoder_input=hidden.transpose(0, 1),
            number=number,
            packed_seq_params=packed_seq_params,
        )
        return output

    def arrange(self, embedded: Tensor, ids: Tensor, mask: Tensor | None, packed: Any) -> tuple[Tensor, Tensor]:
        """Return embeddings and ids as the language model gets them, [b, s, ...]."""
        if packed is None or mask is None:
            return embedded, ids
        bounds = (
            packed.cu_seqlens_q.tolist() if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded.tolist()
        )
        hidden, tokens = embedded.new_zeros(1, bounds[-1], HIDDEN), ids.new_zeros(1, bounds[-1])
        for row, begin in enumerate(bounds[:-1]):
            kept = mask[row].bool()
            hidden[0, begin : begin + int(kept.sum())] = embedded[row, kept]
            tokens[0, begin : begin + int(kept.sum())] = ids[row, kept]
        return hidden, tokens


class PacksItself(TinyLanguageModel):
    """As ROLL's Qwen3-VL: a language model that gets rows and packs them itself, so only its decoder shows how."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.decoder = Decoder(self)

    def forward(
        self, input_ids: Tensor, number: int = 0, attention_mask: Any = None, packed_seq_params: Any = None
    ) -> Tensor:  # type: ignore[override]
        hidden, _ = TinyVLM.arrange(self, self.embedding[input_ids], input_ids, attention_mask, packed_seq_params)  # type: ignore[arg-type]
        hidden = torch.cat([hidden[..., :-1], torch.full_like(hidden[..., -1:], float(number))], dim=-1)
        output: Tensor = self.decoder(hidden_states=hidden.transpose(0, 1))
        return output

    @property
    def routers(self) -> list[Any]:
        return [layer.router for layer in self.layers]


class Decoder(nn.Module):
    """Layers that belong to the model."""

    def __init__(self, model: TinyLanguageModel) -> None:
        super().__init__()
        self.model = [model]  # a list, because it is no child of this one

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.model[0].decode(hidden_states)


def packed(*bounds: int, unpadded: list[int] | None = None) -> Any:
    """PackedSeqParams of a row."""
    real = torch.tensor(bounds if unpadded is None else unpadded, dtype=torch.int32)
    padded = None if unpadded is None else torch.tensor(bounds, dtype=torch.int32)
    return SimpleNamespace(cu_seqlens_q=real, cu_seqlens_q_padded=padded)
