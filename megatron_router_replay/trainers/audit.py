"""Compare what routers used with a rollout's routes, by tokens, while a replay of anybody's decides.

    with mrr.audit(model_chunks, trace) as findings:    around your own replay
        forward_backward(microbatches)
    print(findings)

    MRR_AUDIT=1        this, around each pass of a trainer that replays, with a line in its log
    MRR_AUDIT=raise    raise at the end of a pass that has a wrong decision

The run does not change: hooks read the tokens that a chunk gets and the experts that its routers chose. There is no session.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay
from megatron.core.utils import get_pg_rank, get_pg_size
from torch import Tensor, nn

from megatron_router_replay.errors import LayoutError, ReplayStateError
from megatron_router_replay.layout.split import rows_for_router
from megatron_router_replay.mcore.batches.forwards import ModelForwards
from megatron_router_replay.mcore.batches.inputs import ForwardInputs
from megatron_router_replay.mcore.batches.lookup import RowLookup
from megatron_router_replay.mcore.batches.samples import samples_of
from megatron_router_replay.mcore.batches.segments import CpPartition
from megatron_router_replay.mcore.model.find import Models, as_chunks, find_routers, wrappers
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trainers.seams import bind

_LOG = logging.getLogger(__name__)

DROPS = "apply_router_token_dropping"
"""Megatron-Core's function that takes the tokens above an expert's capacity out of a router's map."""


@dataclass(kw_only=True)
class Findings:
    """Counts of decisions on this rank, complete when the block of `audit` has ended.

    A decision is a token in a layer. It is wrong if other experts were chosen than in the rollout, in any order.

    Args:
        compared, wrong: decisions of forwards whose token has a route, and the wrong ones among them.
        recomputed, recomputed_wrong: the same of recomputes in which the router returned. The recompute of one of torch's
            non-reentrant checkpoints that holds a router alone ends inside of the router, and is not compared, unless its
            forward ran under `torch.utils.checkpoint.set_checkpoint_early_stop(False)`.
        without_route: decisions of forwards whose token has no route, or has several in samples with equal tokens, and of
            padding.
        not_found: forwards with tokens of no sample, or with more or fewer rows in a router, and routers that ran outside of
            a forward of their model; they were not compared.
        first: the first wrong decision, in words; "": there is none.
        other_routers: entries of Megatron-Core's list of RouterReplays that are of none of the model's routers, where these
            have some: of a model beside it, or of a decoder that was built twice, as Qwen3-VL's is. A replay that goes by
            places in that list gives them its routes.
    """

    compared: int = 0
    wrong: int = 0
    recomputed: int = 0
    recomputed_wrong: int = 0
    without_route: int = 0
    not_found: int = 0
    first: str = ""
    other_routers: int = 0

    def __str__(self) -> str:
        text = f"{self.wrong} of {self.compared} decisions wrong, {self.without_route} without a route"
        if not self.compared:
            text = f"nothing was compared, {self.without_route} decisions without a route"
        if self.recomputed:
            text += f"; of recomputes {self.recomputed_wrong} of {self.recomputed} wrong"
        if self.not_found:
            text += f"; {self.not_found} forwards were not compared"
        if self.other_routers:
            text += (
                f"; Megatron-Core also lists {self.other_routers} RouterReplays of other routers, so places in its list are "
                "not those of this model"
            )
        return f"{text}. First: {self.first}" if self.first else text


@contextmanager
def audit(
    model_chunks: Models,
    trace: RoutingTrace,
    *,
    padding_token_ids: Sequence[int] | None = None,
    cp_partition_mode: CpPartition | None = None,
) -> Iterator[Findings]:
    """Compare the experts that routers use with a trace, by tokens.

    Nothing is changed: Megatron-Core's RouterReplay, a replay of your own or the live router decides. Put the block around
    the forwards and backwards of a step, because recomputes are taken to run in the order of the forwards before them.

    Args:
        model_chunks: the model or all of its chunks on this rank. Each chunk's forward, or that of the multimodal model
            around it, gets its tokens as `input_ids`, on every pipeline stage; a forward without them is counted in
            `not_found`.
        trace: the rollout's routes.
        padding_token_ids, cp_partition_mode: as for `mrr.replay`.

    Yields:
        Findings of this rank, counted when the block ends, which waits for the device once. A block that raises has none.
    """
    chunks, trace = as_chunks(model_chunks), _comparable(trace)
    findings = Findings(other_routers=_num_other_routers(chunks))
    lookup = RowLookup(
        trace,
        padding_token_ids=padding_token_ids,
        cp_partition_mode=cp_partition_mode,
    )
    watched = [_WatchedChunk(chunk, trace, lookup, findings) for chunk in chunks]
    with ExitStack() as stack:
        for each in watched:
            for remove in each.add_hooks():
                stack.callback(remove)
            stack.enter_context(each.watching_drops())
        yield findings
    for each in watched:
        each.count()


def _num_other_routers(chunks: Sequence[nn.Module]) -> int:
    routers = [found.router for chunk in chunks for found in find_routers(chunk)]
    replays = [each for router in routers if (each := getattr(router, "router_replay", None)) is not None]
    listed = RouterReplay.global_router_replay_instances
    return sum(not any(each is replay for replay in replays) for each in listed) if replays else 0


def _comparable(trace: RoutingTrace) -> RoutingTrace:
    """Return a trace without the routes in which samples with equal tokens differ.

    The tokens of a forward do not say which of these samples it holds, and a replay by position takes each one's own routes.
    """
    if "comparable" not in trace.derived:  # once for all passes of a rollout
        trace.derived["comparable"] = _without_doubtful_routes(trace)
    comparable: RoutingTrace = trace.derived["comparable"]
    return comparable


def _without_doubtful_routes(trace: RoutingTrace) -> RoutingTrace:
    assert trace.token_ids is not None
    begins: dict[tuple[int, ...], list[int]] = {}
    ids, begin = trace.token_ids.tolist(), 0
    for length in trace.sequence_lengths or ():
        begins.setdefault(tuple(ids[begin : begin + length]), []).append(begin)
        begin += length
    differs = torch.zeros(trace.num_tokens, dtype=torch.bool)
    for tokens, equal in begins.items():
        rows = torch.tensor(equal).unsqueeze(1) + torch.arange(len(tokens))
        routes, masks = trace.topk_indices[rows].sort(dim=3).values, trace.replay_mask[rows]
        differs[rows] = (routes != routes[:1]).flatten(2).any(dim=2).any(dim=0) | (masks != masks[:1]).any(dim=0)
    return trace.without_routes(differs) if bool(differs.any()) else trace


class _WatchedChunk:
    """The decisions of one chunk in one pass. They stay on the device until the pass ends."""

    def __init__(self, chunk: nn.Module, trace: RoutingTrace, lookup: RowLookup, findings: Findings) -> None:
        self._levels, self._trace, self._lookup, self._findings = wrappers(chunk), trace, lookup, findings
        self._routers = [found for found in find_routers(chunk) if not found.is_mtp]
        self._rows: Tensor | None = None  # of the forward that runs now, as the routers see them; None: not found
        self._is_entered = False  # a forward runs now, so its rows were found, or counted as not found
        self._has_backward = True  # so recomputes may follow
        self._chosen: Tensor | None = None  # by the router that runs now, before Megatron-Core drops tokens
        self._decisions: list[tuple[str, bool, Tensor, Tensor, Tensor]] = []

    def add_hooks(self) -> Iterator[Any]:
        """Put the hooks on, and yield what removes each."""
        if not self._routers:
            return
        forwards = ModelForwards(self._levels, begin=self._entered, end=self._left, is_new=lambda: not _in_backward())
        forwards.wrap()
        yield forwards.unwrap
        for found in self._routers:
            routed = partial(self._routed, found.layer_number, deque())
            yield found.router.register_forward_hook(routed, always_call=True).remove

    @contextmanager
    def watching_drops(self) -> Iterator[None]:
        """Keep what routers with a capacity choose: their output is the map of what is left."""
        routers = [found.router for found in self._routers if _has_capacity(found.router)]
        # Trainers replace the routing function by a copy of theirs, which has names of its own.
        scopes = [vars(sys.modules[type(router).__module__]) for router in routers]
        scopes += [inspect.unwrap(type(router).routing).__globals__ for router in routers]
        with ExitStack() as stack:
            for scope in {id(scope): scope for scope in scopes if DROPS in scope}.values():
                original = scope[DROPS]
                stack.callback(scope.__setitem__, DROPS, original)
                scope[DROPS] = partial(self._drop, original)
            yield

    def _drop(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._chosen = bind(original, *args, **kwargs).arguments["routing_map"]
        return original(*args, **kwargs)

    def _entered(self, inputs: ForwardInputs) -> None:
        """Find the rows of a forward's tokens."""
        module = self._levels[-1]
        self._is_entered, self._has_backward = True, torch.is_grad_enabled()
        try:
            rows = self._lookup.locate(module, inputs, "audit").rows
        except (LayoutError, ReplayStateError) as error:
            if not self._findings.not_found:
                _LOG.warning("audit: a forward is not compared: %s", error)
            self._findings.not_found += 1
            self._rows = None
            return
        config: Any = module.config
        group = self._routers[0].router.tp_group  # not the job's: a model may have groups of its own
        self._rows = rows_for_router(
            rows,
            tp_rank=int(get_pg_rank(group)),
            tp_size=int(get_pg_size(group)),
            sequence_parallel=bool(config.sequence_parallel),
        )

    def _left(self, failed: bool) -> None:
        """Forget the rows of a forward that ends: routers that run after it have tokens of their own."""
        self._rows, self._is_entered, self._has_backward = None, False, True

    def _routed(
        self, layer_number: int, forwards: deque[Tensor | None], router: nn.Module, args: Any, output: Any
    ) -> None:
        """Compare a router's map with the rollout's routes. `forwards` are the rows of its forwards so far."""
        is_recompute = _in_backward()
        if is_recompute:
            # Backwards, and so recomputes, of a chunk run in the order of its forwards.
            rows = forwards.popleft() if forwards else None
        if output is None:  # the call failed, or torch ended the recompute
            self._chosen = None
            return
        used = output[1]
        if _has_capacity(router):
            used, self._chosen = self._chosen, None
        if not is_recompute:
            rows = self._rows
            if self._has_backward:
                forwards.append(rows)
        if rows is None or used is None or len(rows) != len(used):
            is_known = is_recompute or self._is_entered
            self._findings.not_found += rows is not None or not is_known
            return
        used = used.bool()
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
                findings.compared += right + wrong
                findings.wrong += wrong
                findings.without_route += without_route
            if wrong and not findings.first:
                samples = samples_of(self._trace)
                sample, position = samples.name(row)
                findings.first = (
                    f"{word}, sample {sample}, position {position}, token {int(samples.token_ids[row])}: the router "
                    f"used experts {used.nonzero().flatten().tolist()}, the rollout {sorted(expected.tolist())}"
                )


def _has_capacity(router: nn.Module) -> bool:
    config: Any = router.config
    return config.moe_expert_capacity_factor is not None


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
