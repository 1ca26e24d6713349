"""Any array of routes with named axes -> RoutingTrace, for engines and files that have no module here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_router_replay.engines.assemble import Allocate
from megatron_router_replay.engines.front import Decoder
from megatron_router_replay.engines.model_info import ModelLike, ModelRoutingInfo
from megatron_router_replay.engines.options import DecodeOptions, TokenIds, WeightVersion
from megatron_router_replay.engines.payload import Array, Source, as_array
from megatron_router_replay.engines.reply import Reply, StatedCount
from megatron_router_replay.engines.rows import RowLayout
from megatron_router_replay.engines.tokens import SampleTokens
from megatron_router_replay.errors import PayloadError
from megatron_router_replay.trace import RoutingTrace

_ENGINE = "array"


def decode(
    result: Any,
    *,
    model: ModelLike,
    axes: Sequence[str],
    layer_numbers: Sequence[int] | None = None,
    token_ids: TokenIds | None = None,
    start: int = 0,
    num_tokens: int | None = None,
    num_prompt_tokens: int | None = None,
    last_token_routed: bool = True,
    allow_surplus_rows: bool = False,
    allow_constant_layers: bool = False,
    weight_version: WeightVersion | None = None,
    sample_id: str | None = None,
    allocate: Allocate | None = None,
) -> RoutingTrace:
    """Return the routes of one sample from an array whose axes are named, nothing about it being guessed.

    Args:
        result: numpy, torch or nested lists, any integer dtype.
        axes: "token", "layer" and "expert" in the array's order, such as ("layer", "token", "expert"); axes of length
            1 may be named "batch" or "".
        layer_numbers: Megatron's layer_number of each entry of the layer axis, entries of other than MoE layers must be
            filler (0 or -1). None: all hidden layers.
        num_prompt_tokens: where the generation begins, for the checks of each part.
        last_token_routed: False: a row of the last token, where there is one, is padding.
        model, token_ids, start, num_tokens, allow_surplus_rows, allow_constant_layers, weight_version, sample_id,
            allocate: as for every engine, see `engines.DecodeOptions`.

    Returns:
        [S, MoE layers, topk] with sequence_lengths (S,); S - 1 - start or S - start rows are legal.

    Raises:
        PayloadError: the axes do not fit the array, or the routes do not fit the tokens or the model.
    """
    named = _NamedAxes(
        axes=tuple(axes),
        layer_numbers=None if layer_numbers is None else tuple(layer_numbers),
        num_prompt_tokens=num_prompt_tokens,
        last_token_routed=last_token_routed,
    )
    decoder = Decoder(name=_ENGINE, read=named.read, rows=named.rows, if_missing="Pass the array.")
    return decoder.decode(
        result,
        model=model,
        token_ids=token_ids,
        start=start,
        num_tokens=num_tokens,
        allow_surplus_rows=allow_surplus_rows,
        allow_constant_layers=allow_constant_layers,
        weight_version=weight_version,
        sample_id=sample_id,
        allocate=allocate,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _NamedAxes:
    """What the caller says of the array."""

    axes: tuple[str, ...]
    layer_numbers: tuple[int, ...] | None
    num_prompt_tokens: int | None
    last_token_routed: bool

    def __post_init__(self) -> None:
        if sorted(self._kept) != ["expert", "layer", "token"]:
            raise PayloadError(f"axes {list(self.axes)} must name one token, one layer and one expert axis.")

    @property
    def _kept(self) -> list[str]:
        return [name for name in self.axes if name not in ("batch", "")]

    def read(self, result: Any, *, batch: bool) -> list[Reply]:
        # The caller's border is compared with his token ids as if a reply had stated it.
        counts: tuple[StatedCount, ...] = ()
        if self.num_prompt_tokens is not None:
            counts = (StatedCount(name="num_prompt_tokens", kind="prompt", value=self.num_prompt_tokens),)
        return [Reply(source=Source(engine=_ENGINE, field="the array"), routed_experts=result, counts=counts)]

    def rows(self, reply: Reply, model: ModelRoutingInfo, tokens: SampleTokens, options: DecodeOptions) -> RowLayout:
        array = self._token_major(as_array(reply.routed_experts, source=reply.source), reply.source)
        layout = RowLayout(parts=(array,), may_have_last_row=True, last_row_is_route=self.last_token_routed)
        if self.layer_numbers is None:
            return layout
        numbers, num_columns = self.layer_numbers, array.shape[1]
        if len(numbers) != num_columns or len(set(numbers)) != len(numbers):
            raise reply.source.error(
                f"layer_numbers names {len(numbers)} layers, the array has {num_columns}: one each, no repeats."
            )
        missing = [number for number in model.moe_layer_numbers if number not in numbers]
        if missing:
            raise reply.source.error(f"has no routes of the MoE layers {missing}.")
        return replace(
            layout,
            moe_columns=tuple(numbers.index(number) for number in model.moe_layer_numbers),
            filler_columns=tuple(i for i, number in enumerate(numbers) if number not in model.moe_layer_numbers),
        )

    def _token_major(self, array: Array, source: Source) -> Array:
        """Return the array as [tokens, layers, topk]."""
        kept = self._kept
        if array.ndim != len(self.axes):
            raise source.error(f"axes {list(self.axes)} do not name shape {list(array.shape)}: one name an axis.")
        extra = [i for i, name in enumerate(self.axes) if name in ("batch", "")]
        if any(array.shape[i] != 1 for i in extra):
            raise source.error(f"has shape {list(array.shape)}, but only axes of length 1 may be named batch or ''.")
        array = array.reshape([size for i, size in enumerate(array.shape) if i not in extra])
        return np.moveaxis(array, [kept.index("token"), kept.index("layer"), kept.index("expert")], [0, 1, 2])
