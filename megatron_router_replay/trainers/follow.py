"""Replay in a trainer that stays unedited: samples come in once, and each of its schedules that replays runs in a session.

    install("slime", replays, {})              in each process that trains
    active().enter(chunks, samples)            by the hook on the trainer's function that has tokens and routes

The hook that all trainers share is on Megatron-Core's `get_forward_backward_func`: a schedule runs inside `mrr.replay`
where the trainer's own switch turns the pass into a replay. A forward's tokens address its rows, so neither how the trainer
lays out its batch matters, nor its own code for routes.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from torch import Tensor, nn

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, PayloadError, ReplayStateError
from megatron_router_replay.mcore.batches.follow import Follower, read_inputs
from megatron_router_replay.mcore.core.streams import collective_device
from megatron_router_replay.mcore.core.tape import in_recompute
from megatron_router_replay.mcore.model.find import as_chunks, unwrap
from megatron_router_replay.mcore.model.layers import layer_numbers_of
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trainers.seams import replace_in_modules

_LOG = logging.getLogger(__name__)

LastToken = Literal["unrouted", "routed"]
Samples = Callable[[], tuple[Any, ...]]


class TrainerReplay:
    """One trainer's replay in this process, from its installation to the end of the process.

    Args:
        trainer: its name, for messages.
        replays: returns whether the pass that begins now replays, from the trainer's own switch.
        options: of `mrr.replay`.

    Attributes:
        metrics: of the newest pass that replayed, over all ranks; see `SessionReport.metrics`.
    """

    audits = False
    """The trainer's own replay stays in charge."""

    def __init__(self, trainer: str, replays: Callable[[], bool], options: Mapping[str, Any]) -> None:
        self.trainer, self.replays, self.options = trainer, replays, options
        self.metrics: dict[str, float] = {}
        self.trace: RoutingTrace | None = None
        self._num_unused = 0  # samples that came in and that no pass replayed yet

    def enter(self, chunks: Any, samples: Samples, *, last_token: LastToken = "unrouted") -> None:
        """Take the samples that all passes replay from now on.

        A collective over all ranks of the job, as the passes are.

        Args:
            chunks: the model's chunks on this rank.
            samples: returns tokens, [T] integers of each sample, and routes, [T or T - 1, layers, topk] integers of each, all
                layers of the model or its MoE layers; a row of -1 has no route.
            last_token: "routed": a forward ran the last token too, as a recording has it; an engine does not run it.

        Raises:
            ReplayStateError: samples came in before, and no pass replayed them.
            LayoutError, PayloadError, SeamError, TraceError: the routes do not fit the tokens or the model; on every rank.
        """
        error: Exception | None = None
        trace: RoutingTrace | None = None
        try:
            self.check_used()
            tokens, routes = samples()
            trace = make_trace(chunks, tokens, routes, last_token)
        except Exception as caught:  # whatever it is, the other ranks must not wait for this one
            error = caught
        raise_together(error)
        assert trace is not None, "without an error there is one"
        self.trace, self._num_unused = trace, len(trace.sequence_lengths or ())

    def check_used(self) -> None:
        """Raise if samples came in that no pass replayed: the trainer's switch is not the one that we read, or moved."""
        if self._num_unused:
            raise ReplayStateError(
                f"MRR809: {self._num_unused} samples came in with routes, and no pass replayed them before the next ones: "
                f"the switch of this {self.trainer} is not the known one, or it runs a schedule of its own."
            )

    def run(self, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one of Megatron-Core's schedules, in a session if the pass replays."""
        chunks = as_chunks(kwargs["model"])
        if not self.replays():
            with checked_not_driven(chunks, self.trainer):
                return schedule(*args, **kwargs)
        if self.trace is None:
            raise ReplayStateError(f"MRR809: a pass of {self.trainer} replays, and no samples came in with routes.")
        self._num_unused = 0  # also where the pass raises: a trainer may catch it and take the next rollout
        with self.session(chunks) as session:
            result = schedule(*args, **kwargs)
        report = session.report.reduce()
        self.metrics = report.metrics()
        if not dist.is_initialized() or dist.get_rank() == 0:
            _LOG.info("router replay: %s", one_line(report))
        return result

    def session(self, chunks: Any) -> Any:
        """Return the session of a pass."""
        return mrr.replay(chunks, self.trace, **self.options)


def make_trace(chunks: Any, tokens: Sequence[Tensor], routes: Sequence[Any], last_token: LastToken) -> RoutingTrace:
    """Return the trace of samples as a trainer has them; see `TrainerReplay.enter`."""
    chunks = as_chunks(chunks)
    numbers = layer_numbers_of(chunks)
    config: Any = unwrap(chunks[0]).config
    rows = [torch.as_tensor(each).detach().cpu() for each in routes]
    for i, part in enumerate(rows):
        if part.dim() != 3 or part.shape[1] == len(numbers):
            continue
        # An engine fills dense layers with 0 and trainers with -1: anything else is a route in the wrong layer.
        dense = sorted(set(range(part.shape[1])) - {number - 1 for number in numbers})
        if bool((part[:-1, dense].to(torch.int16) > 0).any()):
            raise LayoutError(
                f"MRR802: sample {i} has routes in layers {[column + 1 for column in dense]}, which are dense: the layers "
                "are shifted, or the routes are of another model."
            )
    return RoutingTrace.from_samples(
        tokens, rows, num_experts=config.num_moe_experts, layer_numbers=numbers, last_token=last_token
    )


def raise_together(error: Exception | None) -> None:
    """Raise this rank's error, or the error of another rank in its words; a collective over all ranks of the job."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise error
        return
    failed = torch.zeros(dist.get_world_size(), dtype=torch.int32, device=collective_device(None))
    failed[dist.get_rank()] = error is not None
    dist.all_reduce(failed)  # one small tensor; words travel where something is wrong
    ranks = failed.nonzero()[:, 0].tolist()
    if ranks:
        words: list[Any] = [str(error)]
        dist.broadcast_object_list(words, src=ranks[0])
        raise error or PayloadError(
            f"MRR802: the samples of ranks {ranks} cannot be replayed; rank {ranks[0]}: {words[0]}"
        )


@contextmanager
def recorded(chunks: Any, tokens: Sequence[Tensor], routes: list[Tensor]) -> Iterator[Any]:
    """Record the forwards of a block by their tokens; yield the session.

    Args:
        chunks: the model's chunks on this rank.
        tokens: [T] integers of each sample of this data-parallel rank's batch, in whatever micro-batches they run.
        routes: at the end of the block, [T, layers, topk] of each sample are added, of all MoE layers of the model, on
            every rank that shares the batch.

    Raises:
        ReplayStateError: a token was recorded nowhere.
    """
    modules = [unwrap(chunk) for chunk in as_chunks(chunks)]
    ids = [each.detach().cpu().to(torch.int64) for each in tokens]
    config: Any = modules[0].config
    # Nothing but the tokens is known yet; one layer is enough to say so.
    none = [torch.full((len(each), 1, config.moe_router_topk), -1, dtype=torch.int16) for each in ids]
    trace = RoutingTrace.from_samples(ids, none, num_experts=config.num_moe_experts, layer_numbers=[1])
    session = mrr.record(chunks)
    finder = Follower(
        trace,
        padding_token_ids=active().options.get("padding_token_ids"),
        cp_partition_mode=active().options.get("cp_partition_mode"),
        check=session._check,
    )

    def queue(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not in_recompute():
            found = finder.find(module, read_inputs(module, args, kwargs), trace, "recording")
            session.microbatch(found.rows, module, padding=found.padding)

    handles = [module.register_forward_pre_hook(queue, with_kwargs=True, prepend=True) for module in modules]
    try:
        with session:
            yield session
    finally:
        for handle in handles:
            handle.remove()
    groups = [
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    ]
    whole = session.gather(*groups, num_tokens=sum(map(len, ids)))
    starts: dict[tuple[int, ...], int] = {}  # equal samples share the first one's rows
    end = 0
    for sample in ids:
        begin = starts.setdefault(tuple(sample.tolist()), end)
        end += len(sample)
        here = slice(begin, begin + len(sample))
        if not bool(whole.replay_mask[here].all()):
            raise ReplayStateError(f"MRR807: sample {len(routes)} has tokens that no rank recorded.")
        routes.append(whole.topk_indices[here])


def one_line(report: Any) -> str:
    """Return the counts of a pass, for a log."""
    line = f"{report.rows_replayed} replayed, {report.rows_live} live, {report.rows_padding} padding"
    agreement = report.metrics().get("router_replay/agreement")
    return line if agreement is None else f"{line}; agreement {agreement:.0%}"


@contextmanager
def checked_not_driven(chunks: Sequence[nn.Module], trainer: str) -> Iterator[None]:
    """Raise from a forward of these chunks if Megatron-Core's own RouterReplay drives a router of it."""

    def check(chunk: nn.Module, args: Any) -> None:
        for module in chunk.modules():
            action = getattr(getattr(module, "router_replay", None), "router_replay_action", None)
            if action is not None:
                raise ReplayStateError(
                    f"MRR810: {trainer} drives its own replay ({action}) in a pass that was not taken for one that replays: "
                    "its switch is not the one that is known."
                )

    handles = [chunk.register_forward_pre_hook(check) for chunk in chunks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


_installed: list[TrainerReplay] = []


def active() -> TrainerReplay:
    """Return the replay of this process."""
    return _installed[-1]


def is_installed() -> bool:
    """Return whether schedules go through a replay."""
    return bool(_installed)


def install(trainer: str, replays: Callable[[], bool], options: Mapping[str, Any]) -> TrainerReplay:
    """Run every schedule of Megatron-Core through a new replay; an earlier one ends.

    Args:
        trainer, replays, options: see `TrainerReplay`. MRR_AUDIT in the environment makes a `TrainerAudit`.
    """
    kind: type[TrainerReplay] = TrainerReplay
    if os.environ.get("MRR_AUDIT"):
        # Here, for the audit's class is a TrainerReplay.
        from megatron_router_replay.trainers.audit import TrainerAudit

        kind = TrainerAudit
    _installed[:] = [kind(trainer, replays, options)]
    original = schedules.get_forward_backward_func
    if not hasattr(original, "mrr_original"):

        @functools.wraps(original)
        def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
            schedule = original(*args, **kwargs)

            @functools.wraps(schedule)
            def run(*args: Any, **kwargs: Any) -> Any:
                return active().run(schedule, *args, **kwargs) if is_installed() else schedule(*args, **kwargs)

            return run

        get_forward_backward_func.mrr_original = original  # type: ignore[attr-defined]
        replace_in_modules(original, get_forward_backward_func)
    return active()


def report(results: Sequence[Any], *, parts: int = 1) -> None:
    """Add the newest pass's metrics to a trainer's own of each micro-batch.

    Args:
        results: of the trainer's micro-batches; those that are no dict are left alone.
        parts: the number of values that the trainer adds up, 1 if it takes a mean.
    """
    for each in results:
        if isinstance(each, dict):
            each.update({name: value / parts for name, value in active().metrics.items()})


def reporting(original: Any) -> Any:
    """Return the hook of slime's and miles' `train_one_step`, which returns its metrics first."""

    def train_one_step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if result[0]:  # empty on pipeline stages that log nothing
            report(result[:1])
        return result

    return train_one_step


def uninstall() -> None:
    """Let schedules run as Megatron-Core's own again. Hooks on the trainer's functions stay."""
    _installed.clear()
