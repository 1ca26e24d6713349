"""Which columns of a trainer's layer axis are MoE layers, and which of these this rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_router_replay.engines import ModelRoutingInfo
from megatron_router_replay.errors import LayoutError


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The layer axis of routed experts.

    Args:
        moe: the columns that are MoE layers, all of which are checked on every rank, so that all ranks agree.
        numbers: Megatron's layer_number of each of these.
        here: positions in `moe` of this rank's layers.
        filler: columns of dense layers, which hold 0 or -1.
    """

    moe: tuple[int, ...]
    numbers: tuple[int, ...]
    here: tuple[int, ...]
    filler: tuple[int, ...]

    @property
    def numbers_here(self) -> tuple[int, ...]:
        return tuple(self.numbers[i] for i in self.here)


def columns_of(num_columns: int, model: Any, layer_numbers: Sequence[int] | None) -> tuple[ModelRoutingInfo, Columns]:
    """Return what is known of the model, and the columns of its layers on this rank.

    Args:
        num_columns: length of the layer axis.
        model: model chunks of this rank, or a ModelRoutingInfo, which keeps every layer.
        layer_numbers: of each column, 0 for one that is left out unread; None: all layers of the model, dense ones included,
            or its MoE layers alone.

    Raises:
        LayoutError: the axis has neither as many columns as the model has layers nor as it has MoE layers, or layer_numbers
            do not fit it or lack a layer of this rank; or the model has no experts.
        TraceError: the columns are not those of the model's layers; see `check_trace_layers`.
    """
    is_info = isinstance(model, ModelRoutingInfo)
    if not is_info:  # only a model needs Megatron-Core
        from megatron_router_replay.mcore.model.find import as_chunks, find_routers
        from megatron_router_replay.mcore.model.layers import check_trace_layers, routing_info
    info = model if is_info else routing_info(model)
    named = _layer_numbers(num_columns, info, layer_numbers)
    # Numbers behind the decoder's last are those of multi-token prediction, which route.
    moe = [c for c, number in enumerate(named) if number in info.moe_layer_numbers or number > info.num_layers]
    numbers = tuple(named[column] for column in moe)
    here = numbers
    if not is_info:
        routers = [router for chunk in as_chunks(model) for router in find_routers(chunk)]
        # Of multi-token prediction those alone that have a column.
        here = tuple(each.layer_number for each in routers if not each.is_mtp or each.layer_number in numbers)
    missing = sorted(set(here) - set(numbers))
    if missing:
        raise LayoutError(f"MRR802: routed_experts have no column of layer {missing[0]}; layers: {list(named)}.")
    if not is_info:
        check_trace_layers(numbers, model)  # on all columns: a deeper model's would go unseen in this rank's alone
    return info, Columns(
        moe=tuple(moe),
        numbers=numbers,
        here=tuple(i for i, number in enumerate(numbers) if number in here),
        filler=tuple(c for c, number in enumerate(named) if number and c not in moe),
    )


def _layer_numbers(num_columns: int, info: ModelRoutingInfo, layer_numbers: Sequence[int] | None) -> Sequence[int]:
    """Return the layer number of each column, 0 for one that is left out; arguments and errors as of `columns_of`."""
    if layer_numbers is None:
        if num_columns == info.num_layers:
            return range(1, info.num_layers + 1)
        if num_columns == len(info.moe_layer_numbers):
            return info.moe_layer_numbers
        raise LayoutError(
            f"MRR802: routed_experts have {num_columns} layers, the model has {info.num_layers}, "
            f"{len(info.moe_layer_numbers)} of them MoE. Are they of another model, or sliced already? layer_numbers= "
            "names the layer of each column."
        )
    given = [int(number) for number in layer_numbers]
    named = [number for number in given if number]
    if len(given) != num_columns or named != sorted(set(named)) or any(number < 0 for number in named):
        raise LayoutError(
            f"MRR802: layer_numbers {given} do not name {num_columns} columns: one increasing number from 1 each, 0 "
            "for a column that is left out."
        )
    return given
