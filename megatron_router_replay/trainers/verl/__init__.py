"""verl's plug-in: its Megatron engine replays with this package, and verl's own `router_replay.mode` stays the switch.

verl imports this module in each of its processes, as an entry point of the group `verl.plugins` or by
VERL_USE_EXTERNAL_MODULES=megatron_router_replay.trainers.verl. It registers one class with verl's EngineRegistry, which
prefers a class of (device, vendor) to verl's own, and that class only chooses:

    router_replay.mode    the engine
    disabled              verl's own, untouched; our engine is not imported
    R2, R3                RouterReplayEngine; SeamError where a function that it overrides is not as in SEAMS

A verl may lay tokens out in another way: rows are found by the tokens that the model gets. In R3, its agent loop's workers
add the id of each row's token to the routes, as more layers, so that the engine sees rows that were moved on their way.

verl imports its plug-ins before anything else and hides their errors. So here nothing is imported that can fail, verl's
engine (seconds, and Megatron-Core with it) is not loaded in processes that do without it, and what goes wrong later is
raised where verl does not hide it.

Source: verl 0.9.1, verl/__init__.py (plug-ins), workers/engine/base.py (EngineRegistry).
"""

from __future__ import annotations

import functools
import importlib
import os
import warnings
from typing import Any

from megatron_router_replay.errors import RouterReplayError, SeamError
from megatron_router_replay.trainers.seams import Seam, hook, when_imported

ENGINE_MODULE = "verl.workers.engine.megatron"
ENGINE = f"{ENGINE_MODULE}.transformer_impl"
LAYOUTS = tuple(
    Seam(module="verl.models.mcore.util", name=name, parameters="input_ids pre_process")
    for name in ("preprocess_thd_engine", "preprocess_bshd_engine")
)
ENGINE_SEAMS = (
    Seam(
        module=ENGINE,
        name="MegatronEngine.__init__",
        parameters="self model_config engine_config optimizer_config checkpoint_config",
    ),
    Seam(module=ENGINE, name="MegatronEngine.initialize", parameters="self", words="module"),
    Seam(
        module=ENGINE,
        name="MegatronEngine.forward_backward_batch",
        parameters="self data loss_function forward_only",
        words="enable_routing_replay get_forward_backward_func",
    ),
    *LAYOUTS,
)
"""Functions of verl that our engine overrides, or replaces for the length of a pass."""

AGENT_LOOP = Seam(
    module="verl.experimental.agent_loop.agent_loop",
    name="AgentLoopWorker._run_agent_loop",
    parameters="self",
    words="_agent_loop_postprocess",
)
BALANCE = Seam(
    module="verl.trainer.ppo.metric_utils", name="_compute_rollout_moe_load_counts", parameters="routed_experts"
)
SEAMS = (*ENGINE_SEAMS, AGENT_LOOP)  # without BALANCE, which only keeps a metric as it is

RUN_WITH = "0.9.1"
"""The version of verl that our tests drive."""


class VerlError(RouterReplayError):
    """verl's configuration or batch cannot be replayed exactly."""


def _register_if_possible(module: Any) -> None:
    """Register our engine, once verl's own has been imported, by whomever."""
    try:
        register()
    except (ImportError, AttributeError, TypeError) as error:
        import verl

        message = f"MRR806: cannot register this package's engine with verl {verl.__version__}: {error!r}."
        if verl.__version__ == RUN_WITH:
            # verl takes an ImportError here for "no Megatron", and keeps the engine that it has registered.
            raise VerlError(message) from error
        # Without its registry, whether replay is on is not known; where it is off, nothing is lost. A warning, not a log
        # line, so that it is seen before logging is set up.
        warnings.warn(
            f"{message} With router_replay.mode R2 or R3 verl's own replay would run, not this package's.",
            stacklevel=2,
        )


def register() -> None:
    """Put the choosing engine into verl's registry, once verl's engine is imported.

    Raises:
        VerlError: another plug-in has registered a Megatron engine for the same device and vendor.
    """
    from verl.utils.device import get_device_name, get_vendor
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.megatron import MegatronEngineWithLMHead

    if get_device_name() != "cuda":
        return  # verl has another engine there (MindSpeed), which is left alone

    class ChosenEngine(MegatronEngineWithLMHead):  # type: ignore[misc]
        """Makes verl's engine or ours, by `router_replay.mode`; never an instance of itself."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            mode = replay_mode(*args, **kwargs)
            if mode == "disabled":
                return MegatronEngineWithLMHead(*args, **kwargs)
            probe()
            from megatron_router_replay.trainers.verl.engine import RouterReplayEngine

            return RouterReplayEngine(*args, **kwargs)

    # verl reads the environment when it makes an engine; a vendor without an entry gets verl's own.
    vendors = dict.fromkeys(["nvidia", "amd", get_vendor(), os.environ.get("VERL_ENGINE_VENDOR") or "nvidia"])
    try:
        EngineRegistry.register(model_type="language_model", backend="megatron", device="cuda", vendor=list(vendors))(
            ChosenEngine
        )
    except AssertionError as error:
        raise VerlError(
            f"MRR806: another plug-in of verl has registered a Megatron engine: {error}. Leave one of them out with "
            "VERL_USE_EXTERNAL_PLUGINS, which names those to load."
        ) from error


def replay_mode(*args: Any, **kwargs: Any) -> str:
    """Return `router_replay.mode` of the engine config among an engine's arguments; "disabled" where there is none."""
    for value in (*args, *kwargs.values()):
        mode = getattr(getattr(value, "router_replay", None), "mode", None)
        if isinstance(mode, str):
            return mode
    return "disabled"


def probe() -> None:
    """Check the functions of this verl that our engine overrides and replaces.

    Raises:
        SeamError: one is not as known.
    """
    for seam in ENGINE_SEAMS:
        importlib.import_module(seam.module)
        hook(seam, None)


def _hook_driver(module: Any) -> None:
    """Hook the agent loop; where it moved, the engine misses the ids in R3 and raises, and other modes go on."""
    try:
        hook(AGENT_LOOP, _carrying)
    except SeamError as error:
        warnings.warn(f"{error} Without this hook, R3 raises MRR802 in verl's engine.", stacklevel=2)


def _hook_balance(module: Any) -> None:
    if hasattr(module, BALANCE.name):  # since July 2026
        hook(BALANCE, _counting)


def _carrying(original: Any) -> Any:
    def _run_agent_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        megatron = getattr(self.config.actor_rollout_ref.actor, "megatron", None)
        # In the instance: the workers of two trainers have one base class, and methods of their own.
        if "_agent_loop_postprocess" not in vars(self) and replay_mode(megatron) == "R3":
            self._agent_loop_postprocess = functools.partial(_with_tokens, self._agent_loop_postprocess)
        return original(self, *args, **kwargs)

    return _run_agent_loop


def _with_tokens(postprocess: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
    """Add token ids to the routes of an agent loop's outputs, then run verl's function."""
    import torch

    from megatron_router_replay.trainers import token_layers

    for i, each in enumerate(output if isinstance(output, list) else [output]):
        if each.routed_experts is not None:
            ids = torch.tensor([*each.prompt_ids, *each.response_ids])
            # verl cuts rows of tokens that it cut off, too.
            rows = torch.as_tensor(each.routed_experts)[: len(ids)].to(torch.int16)
            each.routed_experts = token_layers.add(rows, ids, sample=i)
    return postprocess(output, *args, **kwargs)


def _counting(original: Any) -> Any:
    def count(routed_experts: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron_router_replay.trainers import token_layers

        if routed_experts is not None and token_layers.are_in(routed_experts):
            routed_experts = token_layers.without(routed_experts)
        return original(routed_experts, *args, **kwargs)

    return count


when_imported(AGENT_LOOP.module, _hook_driver)
when_imported(BALANCE.module, _hook_balance)
# Also where verl is not imported yet: it would find this module imported already, and import it no more.
when_imported(ENGINE_MODULE, _register_if_possible)
