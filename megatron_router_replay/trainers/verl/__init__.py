"""verl's plug-in: its Megatron engine replays with this package, and verl's own `router_replay.mode` stays the switch.

verl imports this module in each of its processes, as an entry point of the group `verl.plugins` or by
VERL_USE_EXTERNAL_MODULES=megatron_router_replay.trainers.verl. It registers one class with verl's EngineRegistry, which
prefers a class of (device, vendor) to verl's own, and that class only chooses:

    router_replay.mode    the engine
    disabled              verl's own, untouched; our engine is not imported
    R2, R3                RouterReplayEngine; SeamError where a function that it overrides is not as in SEAMS

A verl may lay tokens out in another way: rows are found by the tokens that the model gets.

verl imports its plug-ins before anything else and hides their errors. So here nothing is imported that can fail, verl's
engine (seconds, and Megatron-Core with it) is not loaded in processes that do without it, and what goes wrong later is
raised where verl does not hide it.

Source: verl 0.9.1, verl/__init__.py (plug-ins), workers/engine/base.py (EngineRegistry).
"""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.trainers.seams import Seam, hook, when_imported

ENGINE_MODULE = "verl.workers.engine.megatron"
ENGINE = f"{ENGINE_MODULE}.transformer_impl"
LAYOUTS = tuple(
    Seam(module="verl.models.mcore.util", name=name, parameters="input_ids pre_process")
    for name in ("preprocess_thd_engine", "preprocess_bshd_engine")
)
SEAMS = (
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
    for seam in SEAMS:
        importlib.import_module(seam.module)
        hook(seam, None)


# Also where verl is not imported yet: it would find this module imported already, and import it no more.
when_imported(ENGINE_MODULE, _register_if_possible)
