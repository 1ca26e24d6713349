"""Replay in an unedited trainer, by hooks.

    install("slime", replays, {})              in each process that trains
    active().enter(chunks, samples)            by the hook on the trainer's function that has tokens and routes

Samples enter once a rollout. The hook that all trainers share is on Megatron-Core's `get_forward_backward_func`: where the
trainer's own switch turns a pass into a replay, its schedule runs inside `mrr.replay`. Rows are found by tokens, so the
trainer's own layout of routes does not matter.

A driver's process imports these modules too and may have no Megatron-Core, so functions import it, and not the module.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn

import megatron_router_replay as mrr
from megatron_router_replay.checks import check_options
from megatron_router_replay.errors import LayoutError, PayloadError, ReplayStateError, RouterReplayError
from megatron_router_replay.together import raise_together
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trainers.peers import wait_for_peers
from megatron_router_replay.trainers.seams import Seam, bind, hook, take

if TYPE_CHECKING:
    from megatron_router_replay.trainers.audit import Findings

_LOG = logging.getLogger(__name__)

SCHEDULES = Seam("megatron.core.pipeline_parallel.schedules", "get_forward_backward_func")

LastToken = Literal["unrouted", "routed"]
PassKind = Literal["forward-only", "training"]
Samples = Callable[[], tuple[Sequence[Any], Sequence[Any]]]
T = TypeVar("T")


class TrainerReplay:
    """One trainer's replay in this process, until another one is installed.

    Args:
        trainer: its name, for messages.
        replays: reads the trainer's own switch and returns whether the pass that begins now replays; None: passes inside
            `in_pass("replay")` replay.
        options: of `mrr.replay`.

    Attributes:
        padding_token_ids: of the newest samples, if the trainer's batches say them; `options` come first.
        audits: MRR_AUDIT is 1 or raise, so the trainer's own replay stays in charge.
        metrics: of the newest pass that replayed, over all ranks; see `SessionReport.metrics`. {}: no pass replayed these
            samples yet.
        findings: of each pass that was audited.
        kind: of the pass that runs now, where a hook marks it; "": none is marked.

    Raises:
        ReplayStateError: MRR_AUDIT has a different value than 0, 1 or raise.
    """

    def __init__(self, trainer: str, replays: Callable[[], bool] | None, options: Mapping[str, Any]) -> None:
        self.trainer, self.options = trainer, options
        self.padding_token_ids: list[int] | None = None
        self.kind = ""
        self.replays = replays or (lambda: self.kind == "replay")
        audit = os.environ.get("MRR_AUDIT") or "0"  # a shell unsets a variable for one command by an empty one
        if audit not in ("0", "1", "raise"):
            raise ReplayStateError(
                f"MRR806: MRR_AUDIT={audit} is none of 0, 1 and raise. Set it to 1 or raise to audit {trainer}'s own replay; "
                "set it to 0 or unset it to replay with this package."
            )
        self.audits = audit != "0"
        self._raises = audit == "raise" or not self.audits  # without an audit, replay is exact or raises
        self.metrics: dict[str, float] = {}
        self.findings: list[Findings] = []
        self._trace: RoutingTrace | None = None
        self._num_unused = 0  # samples that came in and that no pass replayed yet
        self._are_trained = False  # only a training pass uses these samples
        self._num_passes: Counter[PassKind] = Counter()  # that replayed, or were audited

    # ---- samples
    def enter(
        self, chunks: Any, samples: Samples, *, last_token: LastToken = "unrouted", are_trained: bool = False
    ) -> None:
        """Take the samples that all passes replay from now on.

        A collective over all ranks of the job, as the passes are.

        Args:
            chunks: the model's chunks on this rank.
            samples: returns (tokens, routes), one of each for a sample: [T] and [T or T - 1, layers, topk] integers, of all
                layers or of the MoE layers; a row of -1 has no route. Called here, so that all ranks get its errors.
            last_token: "routed": a forward ran the last token too, as a recording has it; an engine does not run it.
            are_trained: these samples are those of a rollout, so a training pass replays them before the next ones come in.

        Raises:
            As `enter_trace`.
        """
        self.enter_trace(lambda: make_trace(chunks, *samples(), last_token), are_trained=are_trained)

    def enter_trace(self, make: Callable[[], RoutingTrace], *, are_trained: bool = False) -> None:
        """Take the trace that all passes replay from now on; see `enter`.

        Args:
            make: returns the trace. Called here, so that all ranks get its errors.
            are_trained: as in `enter`.

        Raises:
            ReplayStateError: samples came in before, and no pass, or no training pass, replayed them; or a rank never came.
            LayoutError, PayloadError, SeamError, TraceError: the routes do not fit the tokens or the model; a PayloadError on
                ranks where they do. An audit logs these errors, unless MRR_AUDIT=raise.
        """
        num_unused, needed = self._num_unused, "training pass" if self._are_trained else "pass"
        # Before anything raises: no pass may replay, and no log may show, what belongs to an earlier rollout.
        self._trace, self.metrics, self._num_unused = None, {}, 0

        def checked() -> RoutingTrace:
            if num_unused:
                self._complain(
                    f"{num_unused} samples came in with routes, and no {needed} replayed them before the next ones"
                )
            return make()

        wait_for_peers(self.trainer)
        try:
            trace = make_together(checked)
        except RouterReplayError as error:
            if self._raises:
                raise
            _LOG.warning("audit of %s's replay: the samples cannot be compared: %s", self.trainer, error)
            return
        self._trace, self._num_unused, self._are_trained = trace, len(trace.sequence_lengths or ()), are_trained

    @property
    def has_samples(self) -> bool:
        """Return whether the newest samples came in with routes; under an audit, with routes that can be compared."""
        return self._trace is not None

    @contextmanager
    def in_session(self, chunks: Any) -> Iterator[None]:
        """Run all schedules inside the block as one pass that replays, in one session."""
        from megatron_router_replay.mcore.model.find import as_chunks

        chunks = as_chunks(chunks)
        self._num_unused = self._num_unused if self._are_trained else 0
        with self._audit(chunks, "forward-only") if self.audits else self._replay(chunks):
            yield

    @contextmanager
    def in_pass(self, kind: Literal["replay", "record"]) -> Iterator[None]:
        """Mark the passes inside the block.

        Raises:
            ReplayStateError: none ran that should replay.
        """
        self.kind = kind
        try:
            with self.must_replay() if kind == "replay" else nullcontext():
                yield
        finally:
            self.kind = ""

    @contextmanager
    def must_replay(self, kind: PassKind | None = None) -> Iterator[None]:
        """Raise at the end of the block if no pass replayed inside; under an audit, if none was audited.

        Args:
            kind: of the pass that must be among them; None: any.
        """

        def num_passes() -> int:
            return self._num_passes.total() if kind is None else self._num_passes[kind]

        before = num_passes()
        yield
        if num_passes() == before:
            self._complain(f"samples came in with routes, and a {kind or 'marked'} pass did not replay them")

    def _complain(self, message: str) -> None:
        """Raise because a pass did not replay; an audit logs it, unless MRR_AUDIT=raise."""
        message += f": the switch of this {self.trainer} is not the known one, or it runs a schedule of its own."
        if self._raises:
            raise ReplayStateError(f"MRR809: {message}")
        _LOG.warning("audit of %s's replay: %s", self.trainer, message)

    # ---- passes
    @property
    def _session_options(self) -> Mapping[str, Any]:
        padding = {} if self.padding_token_ids is None else {"padding_token_ids": self.padding_token_ids}
        return {**padding, **self.options}

    def run(self, schedule: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one of Megatron-Core's schedules, in a session if the pass replays."""
        from megatron_router_replay.mcore.model.find import as_chunks

        chunks = as_chunks(kwargs["model"])
        around: AbstractContextManager[None]
        if self.replays():
            kind: PassKind = "forward-only" if kwargs.get("forward_only") else "training"
            self._num_passes[kind] += 1
            # Also where the pass raises: a trainer may catch it and take the next rollout.
            if kind == "training" or not self._are_trained:
                self._num_unused = 0
            around = self._audit(chunks, kind) if self.audits else self._replay(chunks)
        else:
            around = nullcontext() if self.audits else refuse_driven_routers(chunks, self.trainer)
        with around:
            return schedule(*args, **kwargs)

    @contextmanager
    def _replay(self, chunks: Sequence[nn.Module]) -> Iterator[None]:
        if self._trace is None:
            raise ReplayStateError(f"MRR809: a pass of {self.trainer} replays, and no samples came in with routes.")
        with mrr.replay(chunks, self._trace, **self._session_options) as session:
            yield
        report = session.report.reduce()
        self.metrics = report.metrics()
        if not dist.is_initialized() or dist.get_rank() == 0:
            line = f"{report.rows_replayed} replayed, {report.rows_live} live, {report.rows_padding} padding"
            agreement = self.metrics.get("router_replay/agreement")
            _LOG.info(
                "router replay: %s", line if agreement is None else f"{line}; agreement {agreement:.0%} beyond chance"
            )

    @contextmanager
    def _audit(self, chunks: Sequence[nn.Module], kind: PassKind) -> Iterator[None]:
        if self._trace is None:  # the samples could not be compared
            yield
            return
        from megatron_router_replay.trainers.audit import audit

        options = self._session_options
        layout = {name: options[name] for name in ("padding_token_ids", "cp_partition_mode") if name in options}
        with audit(chunks, self._trace, **layout) as findings:
            yield
        self.findings.append(findings)
        is_wrong = findings.wrong or findings.recomputed_wrong
        message = f"audit of {self.trainer}'s replay, {kind} pass {len(self.findings)}: {findings}"
        if is_wrong and self._raises:
            raise ReplayStateError(f"MRR811: {message}.")
        _LOG.log(logging.WARNING if is_wrong else logging.INFO, "%s", message)

    def add_metrics(self, results: Sequence[Any]) -> None:
        """Add the newest pass's metrics to a trainer's own dicts of metrics, of which it takes the mean.

        Args:
            results: the trainer's metrics, of a step or of each micro-batch; those that are no dict are left alone.
        """
        for each in results:
            if isinstance(each, dict):
                each.update(self.metrics)


def make_trace(chunks: Any, tokens: Sequence[Any], routes: Sequence[Any], last_token: LastToken) -> RoutingTrace:
    """Return the trace of samples as a trainer has them; see `TrainerReplay.enter`."""
    from megatron_router_replay.mcore.model.find import as_chunks, unwrap
    from megatron_router_replay.mcore.model.layers import layer_numbers_of
    from megatron_router_replay.mcore.model.upstream import num_hash_layers

    chunks = as_chunks(chunks)
    config: Any = unwrap(chunks[0]).config
    moe_layers = layer_numbers_of(chunks)
    # A table of token ids routes DeepSeek-V4's first layers. Engines send zeros there, or ids that need not be distinct.
    numbers = tuple(number for number in moe_layers if number > num_hash_layers(config))
    if missing := [i for i, each in enumerate(routes) if each is None]:
        raise PayloadError(
            f"MRR802: samples {missing[:8]} have no routes, and others have: drop them from the rollout."
        )
    rows = [torch.as_tensor(each).detach().cpu() for each in routes]
    for i, part in enumerate(rows):
        if part.dim() != 3 or part.shape[1] == len(numbers):
            continue
        if part.shape[1] == len(moe_layers):
            rows[i] = part[:, -len(numbers) :]
            continue
        # An engine fills dense layers with 0 and trainers with -1: anything else is a route in the wrong layer.
        dense = sorted(set(range(part.shape[1])) - {number - 1 for number in moe_layers})
        if bool((part[:-1, dense].to(torch.int16) > 0).any()):
            raise LayoutError(
                f"MRR802: sample {i} has routes in layers {[column + 1 for column in dense]}, which are dense: the layers "
                "are shifted, or the routes are of another model."
            )
    return RoutingTrace.from_samples(
        tokens, rows, num_experts=config.num_moe_experts, layer_numbers=numbers, last_token=last_token
    )


def make_together(make: Callable[[], T]) -> T:
    """Return what this rank makes of its samples, or raise on all ranks. A collective over all ranks.

    Args:
        make: called here; whatever it raises, no rank waits for this one.
    """
    made: T | Exception
    try:
        made = make()
    except Exception as error:
        made = error
    # An error alone goes to the other ranks: samples are large.
    raise_together(made if isinstance(made, Exception) else None, _error_of_peers)
    assert not isinstance(made, Exception), "it was raised"
    return made


def _error_of_peers(ranks: list[int], text: str) -> PayloadError:
    return PayloadError(f"MRR802: the samples of ranks {ranks} cannot be replayed; rank {ranks[0]}: {text}")


@contextmanager
def refuse_driven_routers(chunks: Sequence[nn.Module], trainer: str) -> Iterator[None]:
    """Raise in a forward of a chunk one of whose routers is driven by a RouterReplay."""

    def check(chunk: nn.Module, args: Any) -> None:
        for module in chunk.modules():
            action = getattr(getattr(module, "router_replay", None), "router_replay_action", None)
            if action is not None:
                raise ReplayStateError(
                    f"MRR810: {trainer} drives its own replay ({action}) in a pass that was not taken for one that replays: "
                    "its switch is not the known one."
                )

    handles = [chunk.register_forward_pre_hook(check) for chunk in chunks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---- one replay a process
_installed: list[TrainerReplay] = []


def install(trainer: str, replays: Callable[[], bool] | None, options: Mapping[str, Any]) -> TrainerReplay:
    """Run every schedule of Megatron-Core through a new replay; an earlier one ends. See `TrainerReplay`.

    Raises:
        UnsupportedRouterError: this Megatron-Core cannot replay. An audit takes any.
    """
    check_options(f"replay, as {trainer} calls it,", options, inspect.signature(mrr.replay).parameters)
    replay = TrainerReplay(trainer, replays, options)
    if not replay.audits:
        # Before a model is built: the first session comes after a whole rollout.
        from megatron_router_replay.mcore.model.upstream import check_version

        check_version()
    _installed[:] = [replay]
    hook(SCHEDULES, _run_schedules)
    return active()


def install_by_flags(trainer: str, args: Any, replays: Callable[[], bool], options: Mapping[str, Any]) -> TrainerReplay:
    """Install the replay of slime or miles, which have one set of flags for their layouts."""
    layout: dict[str, Any] = {"padding_token_ids": [0]}  # both pad with 0
    if getattr(args, "allgather_cp", False):
        layout["cp_partition_mode"] = "contiguous"
    return install(trainer, replays, {**layout, **options})


def samples_of(seam: Seam, rollout_data: Any, field: str) -> tuple[Any, Any]:
    """Return the tokens and routes of a rollout of slime or miles, one of each for a sample.

    Raises:
        PayloadError: the rollout has no routes, which both trainers leave out if its first sample has none.
        SeamError: it has no tokens.
    """
    if field not in rollout_data:
        raise PayloadError(
            f"MRR802: this rollout has no {field}: its first sample came without routes. SGLang sends them with "
            "--use-rollout-routing-replay; a generate function of your own, or a rollout from a file, must keep them."
        )
    tokens, routes = take(seam, rollout_data, "tokens", field)
    return tokens, routes


def uninstall() -> None:
    """Let schedules run as Megatron-Core's own again. Hooks on the trainer's functions stay."""
    _installed.clear()


def active() -> TrainerReplay:
    """Return the replay of this process."""
    return _installed[-1]


def is_installed() -> bool:
    """Return whether schedules go through a replay."""
    return bool(_installed)


# ---- hooks that several trainers share
def _run_schedules(get_schedule: Any, *args: Any, **kwargs: Any) -> Any:
    """Return one of Megatron-Core's schedules, which runs through the replay."""
    schedule = get_schedule(*args, **kwargs)

    @functools.wraps(schedule)
    def run(*args: Any, **kwargs: Any) -> Any:
        return active().run(schedule, *args, **kwargs) if is_installed() else schedule(*args, **kwargs)

    return run


def run_training_step(train_one_step: Any, *args: Any, **kwargs: Any) -> Any:
    """Run slime's or miles' `train_one_step`, which returns its metrics first.

    Raises:
        ReplayStateError: samples came in with routes, and no training pass replayed them in this step.
    """
    replay = active()
    if not replay.has_samples:  # a critic's step
        return train_one_step(*args, **kwargs)
    with replay.must_replay("training"):
        result = train_one_step(*args, **kwargs)
    if result[0]:  # empty on pipeline stages that log nothing
        replay.add_metrics(result[:1])
    return result


def run_forward_only(forward_only: Any, *args: Any, **kwargs: Any) -> Any:
    """Run slime's or miles' `forward_only`, which must replay where their switch says so.

    Raises:
        ReplayStateError: it did not.
    """
    replay = active()
    with replay.must_replay("forward-only") if replay.replays() else nullcontext():
        return forward_only(*args, **kwargs)


def give_every_stage_tokens(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Give the tokens of a micro-batch of SkyRL or verl to every pipeline stage of a marked pass.

    Their code lays tokens out only on the first stage (`pre_process`); here later stages find their rows by them.
    """
    call = bind(original, *args, **kwargs)
    call.arguments["pre_process"] |= is_installed() and active().kind != ""
    return original(*call.args, **call.kwargs)
