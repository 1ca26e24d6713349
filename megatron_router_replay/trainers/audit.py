"""Is the trainer's own replay right? What its routers used is compared, by tokens, with the rollout's routes.

    MRR_AUDIT=1        log each pass's counts, and the first wrong decision of each pass
    MRR_AUDIT=raise    raise at the end of a pass that has a wrong decision

The trainer's replay stays in charge, and the run does not change: hooks read the tokens that a chunk gets and the routing
maps that leave its routers. There is no session.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_router_replay.errors import LayoutError, ReplayStateError, RouterReplayError
from megatron_router_replay.layout.split import split_sequence_parallel
from megatron_router_replay.mcore.batches.follow import Follower, index_of, on_device, read_inputs
from megatron_router_replay.mcore.model.find import as_chunks, find_routers, unwrap
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trainers.follow import LastToken, Samples, TrainerReplay

_LOG = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Findings:
    """Decisions of one pass on this rank, by their kind.

    Args:
        right, wrong: decisions (a token in a layer) with the rollout's experts, and with different ones.
        without_route: decisions of tokens that the rollout has no route of, and of padding.
        recomputed, recomputed_wrong: decisions of recomputes with a route, and those with other experts than the rollout's.
        not_found: forwards with tokens of no sample, which were not compared.
        first: the first wrong decision, in words; "": there is none.
    """

    right: int = 0
    wrong: int = 0
    without_route: int = 0
    recomputed: int = 0
    recomputed_wrong: int = 0
    not_found: int = 0
    first: str = ""

    def __str__(self) -> str:
        text = f"{self.wrong} of {self.right + self.wrong} decisions wrong, {self.without_route} without a route"
        if self.recomputed:
            text += f"; of recomputes {self.recomputed_wrong} of {self.recomputed} wrong"
        if self.not_found:
            text += f"; {self.not_found} forwards were not compared"
        return f"{text}. First: {self.first}" if self.first else text


class TrainerAudit(TrainerReplay):
    """Compares a trainer's own replay with the samples that came in. See the module.

    Attributes:
        findings: of each pass that replayed, in order.
    """

    audits = True

    def __init__(self, trainer: str, replays: Callable[[], bool], options: Any) -> None:
        super().__init__(trainer, replays, options)
        self.findings: list[Findings] = []

    def enter(self, chunks: Any, samples: Samples, *, last_token: LastToken = "unrouted") -> None:
        """Take the samples; such as a replay refuses are logged and not compared, unless MRR_AUDIT=raise."""
        self.trace = None
        try:
            super().enter(chunks, samples, last_token=last_token)
        except RouterReplayError as error:
            if os.environ.get("MRR_AUDIT") == "raise":
                raise
            _LOG.warning("audit of %s's replay: the samples cannot be compared: %s", self.trainer, error)

    def run(self, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one of Megatron-Core's schedules; watch its routers if the pass replays."""
        if not self.replays() or self.trace is None:
            return schedule(*args, **kwargs)
        self._num_unused = 0
        forward_only = bool(kwargs.get("forward_only"))
        watch = _Watch(kwargs["model"], self.trace, self.options, trains=not forward_only)
        with watch.hooked():
            result = schedule(*args, **kwargs)
        findings = watch.findings()
        self.findings.append(findings)
        kind = "forward-only" if forward_only else "training"
        message = f"audit of {self.trainer}'s replay, {kind} pass {len(self.findings)}: {findings}"
        _LOG.warning(message) if findings.wrong or findings.recomputed_wrong else _LOG.info(message)
        if os.environ.get("MRR_AUDIT") == "raise" and (findings.wrong or findings.recomputed_wrong):
            raise ReplayStateError(f"MRR811: {message}.")
        return result


class _Watch:
    """Hooks on chunks and routers for one pass. Counts stay on the device until the pass ends."""

    def __init__(self, chunks: Any, trace: RoutingTrace, options: Mapping[str, Any], *, trains: bool) -> None:
        self._chunks, self._trace, self._trains = as_chunks(chunks), trace, trains
        self._follower = Follower(
            trace,
            padding_token_ids=options.get("padding_token_ids"),
            cp_partition_mode=options.get("cp_partition_mode"),
            check=_raise_at_once,
        )
        self._counts: list[tuple[bool, Tensor]] = []
        self._first: list[tuple[str, Tensor, Tensor, Tensor]] = []
        self._not_found = 0

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Watch inside the block."""
        handles = []
        for chunk in self._chunks:
            model, current = unwrap(chunk), _Current()
            routers = [found for found in find_routers(chunk) if not found.is_mtp]
            numbers = [found.layer_number for found in routers]
            device = next(model.parameters()).device
            part = (None if device.type == "cpu" else on_device(self._trace, numbers, device)) or self._trace
            handles.append(model.register_forward_pre_hook(partial(self._entered, current, part), with_kwargs=True))
            for found in routers:
                routed = partial(self._routed, current, part, found.layer_number, deque())
                handles.append(found.router.register_forward_hook(routed))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entered(self, current: _Current, part: RoutingTrace, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Find the rows of a forward's tokens, as this rank's routers see them."""
        if _in_backward():
            return
        inputs = read_inputs(module, args, kwargs)
        try:
            rows = self._follower.find(module, inputs, part, "audit").rows
        except (LayoutError, ReplayStateError) as error:
            self._not_found += 1
            if self._not_found == 1:
                _LOG.warning("audit: a forward is not compared: %s", error)
            current.rows = None
            return
        # [b, s] is s-major in the decoder, and with sequence parallelism each rank has a part of s.
        rows = rows.t().reshape(-1)
        config: Any = module.config
        tp_size = parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1
        rank = parallel_state.get_tensor_model_parallel_rank()
        current.rows = split_sequence_parallel(rows, tp_rank=rank, tp_size=tp_size) if tp_size > 1 else rows

    def _routed(
        self,
        current: _Current,
        part: RoutingTrace,
        layer_number: int,
        waiting: deque[Tensor | None],
        router: nn.Module,
        args: Any,
        output: Any,
    ) -> None:
        """Compare a router's map with the rollout's routes."""
        is_recompute, routing_map = _in_backward(), output[1]
        if is_recompute:
            # Backwards, and so recomputes, of a chunk run in the order of its forwards.
            rows = waiting.popleft() if waiting else None
        else:
            rows = current.rows
            if self._trains:
                waiting.append(rows)
        if rows is None or len(rows) != len(routing_map):
            return
        has_route = (rows >= 0) & part.replay_mask[rows.clamp(min=0)]
        expected = part.layer(layer_number)[rows.clamp(min=0)].to(routing_map.device, torch.int64)
        rows, has_route = rows.to(routing_map.device), has_route.to(routing_map.device)
        used = routing_map.bool()
        is_same = used.gather(1, expected).all(1) & (used.sum(1) == expected.shape[1])
        wrong = has_route & ~is_same
        self._counts.append((is_recompute, torch.stack([(has_route & is_same).sum(), wrong.sum(), (~has_route).sum()])))
        at = wrong.to(torch.int8).argmax()
        word = f"layer {layer_number}" + (" of a recompute" if is_recompute else "")
        self._first.append((word, torch.where(wrong.any(), rows[at], -1), used[at], expected[at]))

    def findings(self) -> Findings:
        """Return the counts; on a GPU, this waits for the device."""
        findings = Findings(not_found=self._not_found)
        for is_recompute, counts in self._counts:
            right, wrong, without_route = counts.tolist()
            if is_recompute:
                findings.recomputed += right + wrong
                findings.recomputed_wrong += wrong
            else:
                findings.right += right
                findings.wrong += wrong
                findings.without_route += without_route
        for word, row, used, expected in self._first:
            if int(row) >= 0:
                sample, position = index_of(self._trace).name(int(row))
                assert self._trace.token_ids is not None, "it has an index"
                findings.first = (
                    f"{word}, sample {sample}, position {position}, token {int(self._trace.token_ids[int(row)])}: the router "
                    f"used experts {used.nonzero().flatten().tolist()}, the rollout {sorted(expected.tolist())}"
                )
                break
        return findings


@dataclass(slots=True)
class _Current:
    """The rows of the forward that a chunk runs now, None: not found."""

    rows: Tensor | None = None


def _raise_at_once(condition: Any, message: str, detail: Callable[[], str] | None = None) -> None:
    if bool(condition):
        raise LayoutError(message if detail is None else detail())


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
