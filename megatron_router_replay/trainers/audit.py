"""Is the trainer's own replay right? What its routers used is compared, by tokens, with the rollout's routes.

    MRR_AUDIT=1        log each pass's counts, and the first wrong decision of each pass
    MRR_AUDIT=raise    raise at the end of a pass that has a wrong decision

The trainer's replay stays in charge, and the run does not change: hooks read the tokens that a chunk gets and the routing
maps that leave its routers. There is no session.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_router_replay.errors import LayoutError, ReplayStateError
from megatron_router_replay.layout.split import rows_for_router
from megatron_router_replay.mcore.batches.inputs import read_inputs
from megatron_router_replay.mcore.batches.lookup import RowLookup
from megatron_router_replay.mcore.batches.samples import samples_of
from megatron_router_replay.mcore.model.find import find_routers, unwrap
from megatron_router_replay.trace import RoutingTrace

_LOG = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Findings:
    """Decisions of one pass on this rank, by their kind.

    Args:
        right, wrong: decisions (a token in a layer) with the rollout's experts, and with different ones.
        without_route: decisions of tokens that the rollout has no route of, or several in samples with equal tokens, and of
            padding.
        recomputed, recomputed_wrong: decisions of recomputes with a route, and those with other experts than the rollout's.
        not_found: forwards with tokens of no sample, or with more or fewer rows in a router, and routers that ran outside of
            a forward of their model; they were not compared.
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


@contextmanager
def compared(chunks: Sequence[nn.Module], trace: RoutingTrace, options: Mapping[str, Any]) -> Iterator[Findings]:
    """Compare the routing maps of a pass with a trace; the findings are counted when the block ends.

    Args:
        chunks: the model's chunks on this rank.
        trace: the rollout's routes.
        options: of `mrr.replay`.
    """
    findings = Findings()
    lookup = RowLookup(
        trace,
        padding_token_ids=options.get("padding_token_ids"),
        cp_partition_mode=options.get("cp_partition_mode"),
    )
    watched = [_WatchedChunk(chunk, trace, lookup, findings) for chunk in chunks]
    handles = [handle for each in watched for handle in each.add_hooks()]
    try:
        yield findings
    finally:
        for handle in handles:
            handle.remove()
    for each in watched:
        each.count()


def comparable(trace: RoutingTrace) -> RoutingTrace:
    """Return a trace without the routes in which samples with equal tokens differ.

    The tokens of a forward do not say which of these samples it holds, and the trainer replays each one's own routes.
    """
    assert trace.token_ids is not None
    begins: dict[tuple[int, ...], list[int]] = {}
    ids, begin = trace.token_ids.tolist(), 0
    for length in trace.sequence_lengths or ():
        begins.setdefault(tuple(ids[begin : begin + length]), []).append(begin)
        begin += length
    differs = torch.zeros(len(trace), dtype=torch.bool)
    for tokens, equal in begins.items():
        rows = torch.tensor(equal).unsqueeze(1) + torch.arange(len(tokens))
        routes, masks = trace.topk_indices[rows].sort(dim=3).values, trace.replay_mask[rows]
        differs[rows] = (routes != routes[:1]).flatten(2).any(dim=2).any(dim=0) | (masks != masks[:1]).any(dim=0)
    return trace.without_routes(differs) if bool(differs.any()) else trace


class _WatchedChunk:
    """The decisions of one chunk in one pass. They stay on the device until the pass ends."""

    def __init__(self, chunk: nn.Module, trace: RoutingTrace, lookup: RowLookup, findings: Findings) -> None:
        self._model, self._trace, self._lookup, self._findings = unwrap(chunk), trace, lookup, findings
        self._routers = [found for found in find_routers(chunk) if not found.is_mtp]
        self._rows: Tensor | None = None  # of the forward that runs now, as the routers see them; None: not found
        self._is_entered = False  # a forward runs now, so its rows were found, or counted as not found
        self._decisions: list[tuple[str, bool, Tensor, Tensor, Tensor]] = []

    def add_hooks(self) -> list[Any]:
        """Put the hooks on, and return their handles."""
        if not self._routers:
            return []
        handles: list[Any] = [
            self._model.register_forward_pre_hook(self._entered, with_kwargs=True),
            self._model.register_forward_hook(self._left, always_call=True),
        ]
        for found in self._routers:
            routed = partial(self._routed, found.layer_number, deque())
            handles.append(found.router.register_forward_hook(routed))
        return handles

    def _entered(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Find the rows of a forward's tokens."""
        if _in_backward():
            return
        self._is_entered = True
        try:
            rows = self._lookup.find(module, read_inputs(module, args, kwargs), "audit").rows
        except (LayoutError, ReplayStateError) as error:
            if not self._findings.not_found:
                _LOG.warning("audit: a forward is not compared: %s", error)
            self._findings.not_found += 1
            self._rows = None
            return
        config: Any = module.config
        self._rows = rows_for_router(
            rows,
            tp_rank=parallel_state.get_tensor_model_parallel_rank(),
            tp_size=parallel_state.get_tensor_model_parallel_world_size(),
            sequence_parallel=bool(config.sequence_parallel),
        )

    def _left(self, *_: Any) -> None:
        """Forget the rows of a forward that ends: routers that run after it have tokens of their own."""
        self._rows, self._is_entered = None, False

    def _routed(
        self, layer_number: int, forwards: deque[Tensor | None], router: nn.Module, args: Any, output: Any
    ) -> None:
        """Compare a router's map with the rollout's routes. `forwards` are the rows of its forwards so far."""
        is_recompute, used = _in_backward(), output[1].bool()
        if is_recompute:
            # Backwards, and so recomputes, of a chunk run in the order of its forwards.
            rows = forwards.popleft() if forwards else None
        else:
            rows = self._rows
            forwards.append(rows)
        if rows is None or len(rows) != len(used):
            is_known = is_recompute or self._is_entered
            self._findings.not_found += rows is not None or not is_known
            return
        at_trace = rows.clamp(min=0)
        has_route = ((rows >= 0) & self._trace.replay_mask[at_trace]).to(used.device)
        expected = self._trace.layer(layer_number)[at_trace].to(used.device, torch.int64)
        is_same = used.gather(1, expected).all(1) & (used.sum(1) == expected.shape[1])
        wrong = has_route & ~is_same
        at = wrong.to(torch.int8).argmax()
        first_row = torch.where(wrong.any(), rows.to(used.device)[at], -1)
        counts = torch.stack([(has_route & is_same).sum(), wrong.sum(), (~has_route).sum(), first_row])
        word = f"layer {layer_number}" + (" of a recompute" if is_recompute else "")
        self._decisions.append((word, is_recompute, counts, used[at], expected[at]))

    def count(self) -> None:
        """Add the decisions to the findings; on a GPU, this waits for the device."""
        findings = self._findings
        for word, is_recompute, counts, used, expected in self._decisions:
            right, wrong, without_route, row = counts.tolist()
            if is_recompute:
                findings.recomputed += right + wrong
                findings.recomputed_wrong += wrong
            else:
                findings.right += right
                findings.wrong += wrong
                findings.without_route += without_route
            if wrong and not findings.first:
                samples = samples_of(self._trace)
                sample, position = samples.name(row)
                findings.first = (
                    f"{word}, sample {sample}, position {position}, token {int(samples.token_ids[row])}: the router "
                    f"used experts {used.nonzero().flatten().tolist()}, the rollout {sorted(expected.tolist())}"
                )


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
