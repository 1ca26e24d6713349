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
        num_columns: its length.
        moe: the columns that are MoE layers, all of which are checked on every rank, so that all ranks agree.
        numbers: Megatron's layer_number of each of these.
        here: positions in `moe` of this rank's layers.
        filler: columns of dense layers, which hold 0 or -1.
    """

    num_columns: int
    moe: tuple[int, ...]
    numbers: tuple[int, ...]
    here: tuple[int, ...]
    filler: tuple[int, ...]

    @property
    def numbers_here(self) -> tuple[int, ...]:
        return tuple(self.numbers[i] for i in self.here)

    @classmethod
    def of(
        cls,
        num_columns: int,
        info: ModelRoutingInfo,
        *,
        here: Sequence[int] | None = None,
        layer_numbers: Sequence[int] | None = None,
    ) -> Columns:
        """Read the axis.

        Args:
            here: layer numbers of this rank's routers; None: all of the model's.
            layer_numbers: of each column, 0 for one that is left out unread; None: all layers of the model, dense ones
                included, or its MoE layers alone.

        Raises:
            LayoutError: the axis has neither as many columns as the model has layers nor as it has MoE layers, or
                layer_numbers do not fit it or lack a layer of this rank.
        """
        moe = set(info.moe_layer_numbers)
        if layer_numbers is None:
            if num_columns == info.num_layers:
                layer_numbers = range(1, info.num_layers + 1)
            elif num_columns == len(moe):
                layer_numbers = info.moe_layer_numbers
            else:
                raise LayoutError(
                    f"routed_experts have {num_columns} layers, the model has {info.num_layers}, {len(moe)} of them MoE. Are "
                    "they of another model, or sliced already? layer_numbers= names the layer of each column."
                )
        else:
            layer_numbers = [int(number) for number in layer_numbers]
            named = [number for number in layer_numbers if number]
            if len(layer_numbers) != num_columns or named != sorted(set(named)) or any(n < 0 for n in named):
                raise LayoutError(
                    f"layer_numbers {layer_numbers} do not name {num_columns} columns: one increasing number from 1 each, 0 "
                    "for a column that is left out."
                )
        last = info.num_layers
        # Numbers behind the decoder's last are those of multi-token prediction, which route.
        pairs = [(c, number) for c, number in enumerate(layer_numbers) if number in moe or number > last]
        numbers = tuple(number for _, number in pairs)
        wanted = numbers if here is None else tuple(here)
        missing = [number for number in wanted if number not in numbers]
        if missing:
            raise LayoutError(f"routed_experts have no column of layer {missing[0]}; layers: {list(layer_numbers)}.")
        return cls(
            num_columns=num_columns,
            moe=tuple(column for column, _ in pairs),
            numbers=numbers,
            here=tuple(i for i, number in enumerate(numbers) if number in set(wanted)),
            filler=tuple(
                c for c, number in enumerate(layer_numbers) if number and number not in moe and number <= last
            ),
        )


def columns_of(num_columns: int, model: Any, layer_numbers: Sequence[int] | None) -> tuple[ModelRoutingInfo, Columns]:
    """Return what is known of the model, and the columns of its layers on this rank.

    Args:
        model: model chunks of this rank, or a ModelRoutingInfo, which keeps every layer.
        layer_numbers: as for `Columns.of`.

    Raises:
        LayoutError: as `Columns.of`; or the model has no experts.
    """
    if isinstance(model, ModelRoutingInfo):
        return model, Columns.of(num_columns, model, layer_numbers=layer_numbers)
    from megatron_router_replay.mcore import find_routers  # needs Megatron-Core
    from megatron_router_replay.mcore.find import as_chunks
    from megatron_router_replay.mcore.layers import check_trace_layers

    info = ModelRoutingInfo.of_model(model)
    named = set(layer_numbers or ())
    here = sorted(
        found.layer_number
        for chunk in as_chunks(model)
        for found in find_routers(chunk)
        if not found.is_mtp or found.layer_number in named
    )
    columns = Columns.of(num_columns, info, here=here, layer_numbers=layer_numbers)
    check_trace_layers(columns.numbers, model)  # on all columns: a deeper model's would go unseen in this rank's alone
    return info, columns
