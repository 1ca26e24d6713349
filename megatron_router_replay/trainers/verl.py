"""verl's plug-in: its Megatron engine replays with this package, and verl's own `router_replay.mode` stays the switch.

verl imports this module in each of its processes, as an entry point of the group `verl.plugins` or by
VERL_USE_EXTERNAL_MODULES=megatron_router_replay.trainers.verl. verl's own replay is off in an engine with mode R2 or R3,
from its construction on. An engine with mode "disabled" and a critic's are verl's own, untouched.

    R3    the batch's `routed_experts` are an engine's, as verl's agent loop lays them out: T rows a sample, zeros where the
          engine has none. The agent loop's workers add the id of each row's token to them, as more layers.
    R2    the old log-probs' forward is recorded, and its `routed_experts` come back with later batches, however verl cuts
          these.

verl imports its plug-ins before anything else and hides their errors. So here nothing is imported that can fail, and a seam
that moved raises where an engine with R2 or R3 is made.

Source: verl 0.9.1, verl/__init__.py (plug-ins), workers/engine/megatron/transformer_impl.py.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.errors import LayoutError, PayloadError, ReplayStateError, SeamError
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trainers import replayer, token_layers
from megatron_router_replay.trainers.seams import Seam, bind, hook, when_imported

ENGINE = "verl.workers.engine.megatron.transformer_impl"
INIT = Seam(ENGINE, "MegatronEngine.__init__", "self model_config engine_config optimizer_config checkpoint_config")
PASS = Seam(
    ENGINE,
    "MegatronEngine.forward_backward_batch",
    "self data loss_function forward_only",
    words="enable_routing_replay get_forward_backward_func module",
)
LAYOUTS = tuple(
    Seam("verl.models.mcore.util", name, "input_ids pre_process")
    for name in ("preprocess_thd_engine", "preprocess_bshd_engine")
)
AGENT_LOOP = Seam(
    "verl.experimental.agent_loop.agent_loop",
    "AgentLoopWorker._run_agent_loop",
    "self",
    words="_agent_loop_postprocess",
)
BALANCE = Seam("verl.trainer.ppo.metric_utils", "_compute_rollout_moe_load_counts", "routed_experts")
SEAMS = (INIT, PASS, *LAYOUTS, AGENT_LOOP)  # without BALANCE, which only keeps a metric as it is

options: dict[str, Any] = {"padding_token_ids": [0]}  # verl's packers fill with 0
"""Of `mrr.replay`; a plug-in of your own may set them."""


def mode_of(config: Any) -> str:
    """Return `router_replay.mode` of an engine's configuration; "disabled" where there is none."""
    mode: str | None = getattr(getattr(config, "router_replay", None), "mode", None)
    return mode or "disabled"


# ---- the agent loop's workers, and the driver's metrics
def _run_agent_loop(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    megatron = getattr(self.config.actor_rollout_ref.actor, "megatron", None)
    # In the instance: the workers of two trainers have one base class, and methods of their own.
    if "_agent_loop_postprocess" not in vars(self) and mode_of(megatron) == "R3":
        self._agent_loop_postprocess = partial(_with_tokens, self._agent_loop_postprocess)
    return original(self, *args, **kwargs)


def _with_tokens(postprocess: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
    """Add token ids to the routes of an agent loop's outputs, then run verl's function."""
    for i, each in enumerate(output if isinstance(output, list) else [output]):
        if each.routed_experts is None:
            continue
        ids = torch.tensor([*each.prompt_ids, *each.response_ids])
        # verl cuts rows of tokens that it cut off, too.
        rows = torch.as_tensor(each.routed_experts)[: len(ids)].to(torch.int16)
        # An engine may send zeros for tokens that it did not run, after those that trained tokens depend on.
        trained = [at for at, is_trained in enumerate(each.response_mask, len(each.prompt_ids)) if is_trained]
        needed = max(trained, default=1)
        unrouted = (rows[:needed] == -1).flatten(1).all(dim=1).nonzero()
        if trained and unrouted.numel():
            raise PayloadError(
                f"MRR802: sample {i} has no route at position {int(unrouted[0])}, which trained tokens depend on "
                f"({len(unrouted)} of {needed} rows are -1): the engine did not keep the routes of a cached prefix. Turn its "
                "prefix cache off, or leave this sample out of the loss."
            )
        sent = (rows[needed:] > 0).flatten(1).any(dim=1).nonzero()
        rows = rows[: needed + (int(sent[-1]) + 1 if sent.numel() else 0)]
        each.routed_experts = token_layers.add(rows, ids, sample=i, at_least=needed)
    return postprocess(output, *args, **kwargs)


def _count_balance(original: Any, *args: Any, **kwargs: Any) -> Any:
    call = bind(original, *args, **kwargs)
    routed_experts = call.arguments["routed_experts"]
    if routed_experts is not None and token_layers.are_in(routed_experts):
        call.arguments["routed_experts"] = token_layers.without(routed_experts)
    return original(*call.args, **call.kwargs)


# ---- the engine
def _construct(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """Make verl's engine; with R2 or R3, its own replay is off, and its passes are those of `_run_pass`.

    Raises:
        SeamError: a function that is hooked moved.
        ReplayStateError: the configuration cannot be replayed exactly; names the field and the reason.
    """
    from verl.utils.device import get_device_name

    call = bind(original, self, *args, **kwargs)
    engine_config = call.arguments["engine_config"]
    mode, critic = mode_of(engine_config), importlib.import_module(ENGINE).MegatronEngineWithValueHead
    # On devices other than GPUs (NPUs), the engine is verl's own.
    if mode == "disabled" or isinstance(self, critic) or get_device_name() != "cuda":
        original(self, *args, **kwargs)
        return
    hook(PASS, _run_pass)
    for seam in LAYOUTS:
        importlib.import_module(seam.module)
        hook(seam, replayer.give_every_stage_tokens)
    replay = replayer.install("verl", None, options)
    for name, is_set, why in (
        ("dynamic_context_parallel", engine_config.dynamic_context_parallel, "groups change with each micro-batch"),
        ("MRR_AUDIT", replay.audits, "an audit of verl's own replay is not built"),
    ):
        if is_set:
            raise ReplayStateError(f"MRR806: router_replay.mode={mode} cannot be exact with {name}: {why}.")
    off = replace(engine_config, router_replay=replace(engine_config.router_replay, mode="disabled"))
    call.arguments["engine_config"] = off
    original(*call.args, **call.kwargs)
    self.engine_config, self.mrr_mode = engine_config, mode  # verl changes this configuration later


def _run_pass(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `forward_backward_batch`; a marked batch is replayed, or recorded (R2, no routes yet, forward_only).

    Raises:
        ReplayStateError: the batch does not say whether to replay, or has no routes; or as the session's end.
        PayloadError, LayoutError, TraceError: its routes do not fit; on every rank of the job.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import TopKRouter
    from verl.utils import tensordict_utils as tu

    run, given = partial(original, self, *args, **kwargs), bind(original, self, *args, **kwargs).arguments
    data, forward_only = given["data"], given["forward_only"]
    mode = getattr(self, "mrr_mode", "disabled")
    marked = mode != "disabled" and tu.get_non_tensor_data(data, key="enable_routing_replay", default=None)
    if marked is None:
        raise ReplayStateError(
            f"MRR806: router_replay.mode={mode}, but the batch does not say whether to replay it: assign the non-tensor "
            "enable_routing_replay, True for the actor's own forwards (also old log-probs), False for others."
        )
    if not marked:
        return run()
    if hasattr(TopKRouter, "_router_replay_patched"):
        raise ReplayStateError(
            "MRR806: verl's own replay has patched Megatron's TopKRouter in this process (apply_router_replay_patch): "
            "routers would run verl's copy of the routing function. Which engine with router_replay.mode other than "
            "disabled is not of this package, a critic's? Disable it there."
        )
    routed_experts = data.pop("routed_experts", None)
    tu.assign_non_tensor(data, enable_routing_replay=False)  # verl's own replay sees no mark
    try:
        if routed_experts is None and mode == "R2" and forward_only:
            return _record(self.module, data, run)
        if routed_experts is None:
            raise ReplayStateError(
                f"MRR806: router_replay.mode={mode}, but the batch has no routed_experts. In R3, "
                "rollout.enable_rollout_routing_replay=True makes the engine send them; in R2, the old log-probs' forward "
                "returns them: keep that field in the batch."
            )
        replay = replayer.active()
        last_token: replayer.LastToken = "unrouted" if mode == "R3" else "routed"
        replay.enter(self.module, lambda: _samples(data, routed_experts, mode), last_token=last_token)
        with replay.in_pass("replay"):
            output = run()
        if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            # A list, as verl has of each micro-batch: it flattens one of each data-parallel rank, and takes the mean.
            output["metrics"].update({name: [value] for name, value in replay.metrics.items()})
        return output
    finally:
        tu.assign_non_tensor(data, enable_routing_replay=True)
        if routed_experts is not None:
            data["routed_experts"] = routed_experts


def _record(chunks: Any, data: Any, run: Callable[[], Any]) -> Any:
    """Run `forward_backward_batch` in a recording; its output gets the routes of each sample, with token ids."""
    from megatron.core import parallel_state

    # Padding is recorded as well: a sample may end in a padding token, and verl's layout does not say where it ends.
    partition = options.get("cp_partition_mode")
    recording = mrr.record(chunks, padding_token_ids=[], cp_partition_mode=partition)
    with replayer.active().in_pass("record"), recording:
        output = run()
    whole = recording.gather(
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_context_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return output
    sequences, values, ids = _by_tokens(whole), [], data["input_ids"]
    for i, tokens in enumerate(ids.unbind()):
        recorded = sequences.get(_without_padding(tokens))
        if recorded is None or not bool(recorded.replay_mask[: len(tokens)].all()) or recorded.num_tokens < len(tokens):
            raise ReplayStateError(f"MRR807: sample {i} has tokens that no rank recorded.")
        values.append(token_layers.add(recorded.topk_indices[: len(tokens)], tokens, sample=i))
    output["model_output"]["routed_experts"] = torch.nested.nested_tensor_from_jagged(
        torch.cat(values).to(ids.device), offsets=ids.offsets()
    )
    return output


def _by_tokens(recorded: RoutingTrace) -> dict[tuple[int, ...], RoutingTrace]:
    """Return the recorded sequences by their tokens, without padding; of equal ones, the longest.

    Raises:
        ReplayStateError: equal ones have routes of different inputs, such as images.
    """
    from megatron_router_replay.mcore.batches.equal_samples import unlike

    sequences: dict[tuple[int, ...], tuple[int, RoutingTrace]] = {}
    begin = 0
    for sequence in recorded.samples():
        assert sequence.token_ids is not None, "a recording has them"
        tokens = _without_padding(sequence.token_ids)
        first, known = sequences.setdefault(tokens, (begin, sequence))
        if why := unlike(recorded, first, begin, len(tokens)):
            raise ReplayStateError(
                f"MRR208: two samples of a batch have the same {len(tokens)} tokens, and they {why}: their images differ, "
                "and the tokens do not show whose routes are whose. Leave one of them out of the batch."
            )
        if sequence.num_tokens > known.num_tokens:
            sequences[tokens] = begin, sequence
        begin += sequence.num_tokens
    return {tokens: sequence for tokens, (_, sequence) in sequences.items()}


def _without_padding(tokens: Tensor) -> tuple[int, ...]:
    ids = tokens.tolist()
    while ids and ids[-1] == 0:
        ids.pop()
    return tuple(ids)


# ---- samples and settings
def _samples(data: Any, routed_experts: Any, mode: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return tokens [T] and routes [T, layers, topk] of each sample, -1 where there is no route.

    verl fills with zeros the rows that the agent loop did not send: the last token, all tokens after the last generation of
    a multi-turn sample, and whole samples that only fill up a batch, of which nothing is trained.
    """
    tokens, routes = list(data["input_ids"].unbind()), []
    masks = data.get("response_mask", None)
    trains = [True] * len(tokens) if masks is None else [bool((mask != 0).any()) for mask in masks.unbind()]
    for i, (rows, ids, is_trained) in enumerate(zip(routed_experts.unbind(), tokens, trains, strict=True)):
        if len(rows) != len(ids):
            raise LayoutError(f"MRR802: sample {i} has another number of routed_experts than of input_ids.")
        at_least = len(ids) if mode == "R2" else int(is_trained)
        routes.append(token_layers.remove(rows, ids, sample=i, at_least=at_least))
    return tokens, routes


# ---- hooks, also where verl is not imported yet: it would find this module imported already, and import it no more
def _hook_or_warn(seam: Seam, around: Callable[..., Any], loss: str) -> None:
    """Hook a seam; if it moved, warn of the loss and raise nothing, because whether verl replays is not known here."""

    def then(module: Any) -> None:
        try:
            hook(seam, around)
        except SeamError as error:
            warnings.warn(f"{error} {loss}", stacklevel=2)

    when_imported(seam.module, then)


def _hook_balance(module: Any) -> None:
    if hasattr(module, BALANCE.name):  # since July 2026
        _hook_or_warn(BALANCE, _count_balance, "verl's rollout/moe/* metrics would count token ids as experts.")


_hook_or_warn(INIT, _construct, "With router_replay.mode R2 or R3 verl's own replay would run, not this package's.")
_hook_or_warn(AGENT_LOOP, _run_agent_loop, "Without this hook, R3 raises MRR802 in verl's engine.")
when_imported(BALANCE.module, _hook_balance)
