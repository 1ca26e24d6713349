"""What senders and receivers share: a `with` block that ends well on both sides, or tells the other side why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Self

from torch import Tensor

from megatron_router_replay.transport.errors import TransportError
from megatron_router_replay.transport.offer import Offer, check_offer
from megatron_router_replay.transport.partition import Partition
from megatron_router_replay.transport.plan import ParallelLayout, Place, TransportPlan, plan_routes
from megatron_router_replay.transport.rows import RowSource, check_plan
from megatron_router_replay.transport.timing import LegTimes, Side

TIMEOUT = timedelta(minutes=2)
READY_TIMEOUT = timedelta(hours=2)


class Endpoint:
    """One end of a transport, to be used as a `with` block or closed by hand.

    Args:
        side, place: which end; place: of the rank, on the training side.
        times: where legs are counted; None: in new ones.
    """

    def __init__(
        self, layout: ParallelLayout, *, side: Side, place: Place | None = None, times: LegTimes | None
    ) -> None:
        self.layout = layout
        self.times = LegTimes(side) if times is None else times
        self._end = f"{side} side" if place is None else f"{side} side, {place}"
        self._step = 0
        self._broken: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Tell the other side that this one cannot go on, and why; it raises. The first failure counts."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connections; the other side raises if it still waits for this one."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
            else:
                self.fail(error)
        finally:
            self.close()

    def _finish(self) -> None:
        """Do what is left at the end of a block without an exception."""

    def _failure(self) -> str | None:
        """Return why this endpoint cannot go on, for the other side; None while it can."""
        return None if self._broken is None else f"{self._end}: {type(self._broken).__name__}: {self._broken}"

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise TransportError(f"this transport failed before: {self._broken}") from self._broken


class SendingEndpoint(Endpoint):
    """The rollout side."""

    def __init__(self, layout: ParallelLayout, *, times: LegTimes | None) -> None:
        super().__init__(layout, side="rollout", times=times)

    def join(self) -> None:
        """Wait until the batch under way has arrived everywhere."""
        raise NotImplementedError

    def _finish(self) -> None:
        self.join()

    def _plan(
        self,
        source: RowSource,
        *,
        partition: Partition,
        cp_rows: Mapping[tuple[int, int], Tensor] | None,
        plan: TransportPlan | None,
    ) -> TransportPlan:
        """Return the plan that the caller made, once it is known to be of this batch, or make one.

        Raises:
            TransportError: the plan is of another batch or layout; the batch cannot be sent to this layout.
        """
        if plan is None:
            return plan_routes(
                source.sequence_lengths,
                layout=self.layout,
                format=source.format,
                partition=partition,
                cp_rows=cp_rows,
            )
        check_plan(plan, source, self.layout)
        return plan


class ReceivingEndpoint(Endpoint):
    """One rank of the training side.

    Args:
        place: of this rank, `layout.place_of(rank)`.

    Raises:
        TransportError: the layout has no such place.
    """

    def __init__(self, layout: ParallelLayout, place: Place, *, times: LegTimes | None) -> None:
        if place not in layout.places():
            raise TransportError(f"{place} is not in the layout: {layout}.")
        super().__init__(layout, side="training", place=place, times=times)
        self.place = place

    def _offer_check(self, plan: TransportPlan | None) -> Callable[[Offer], str | None]:
        """Return what says why this step's offer cannot be taken, or None; a plan that lacks this place raises here."""
        return partial(
            check_offer,
            step=self._step,
            place=self.place,
            layer_numbers=self.layout.stage_layers[self.place.pp_rank],
            expected=plan,
            part=None if plan is None else plan.part(self.place),
        )
