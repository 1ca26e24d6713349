"""verl's plug-in: its Megatron engine replays with this package, and verl's own `router_replay.mode` stays the switch.

verl imports this module in each of its processes, as an entry point of the group `verl.plugins` or by
VERL_USE_EXTERNAL_MODULES=megatron_router_replay.trainers.verl. It registers one class with verl's EngineRegistry, which
prefers a class of (device, vendor) to verl's own, and that class only chooses:

    router_replay.mode    the engine
    disabled              verl's own, untouched; nothing of ours is imported
    R2, R3                RouterReplayEngine; VerlError where what it overrides or calls is not as in VERL_SIGNATURES

A verl that lays tokens out in another way behind the same functions is noticed in its first forward: rows of a trace are
compared with the tokens that the model gets.

verl imports its plug-ins before anything else and hides their errors. So here nothing is imported that can fail, verl's
engine (seconds, and Megatron-Core with it) is not loaded in processes that do without it, and what goes wrong later is
raised where verl does not hide it.

Source: verl 0.9.1, verl/__init__.py (plug-ins), workers/engine/base.py (EngineRegistry).
"""

from __future__ import annotations

import importlib
import inspect
import operator
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from megatron_router_replay.errors import RouterReplayError

VERL_SIGNATURES = {
    "verl.workers.engine.megatron:MegatronEngineWithLMHead.__init__": (
        "self model_config engine_config optimizer_config checkpoint_config"
    ),
    "verl.workers.engine.megatron:MegatronEngineWithLMHead.initialize": "self",
    "verl.workers.engine.megatron:MegatronEngineWithLMHead.forward_backward_batch": "self data loss_function forward_only",
    "verl.workers.engine.megatron:MegatronEngineWithLMHead.forward_step": (
        "self batch_iter model logits_processor_func postprocess_micro_batch_func"
    ),
    "verl.workers.engine.megatron:MegatronEngineWithLMHead._get_context_parallel_layout": "unwrapped_model",
    "verl.models.mcore.util:preprocess_thd_engine": (
        "input_ids pre_process need_roll use_fp8_padding local_cp_size min_local_rows pad_to_length_bucket cp_layout"
    ),
    "verl.models.mcore.util:preprocess_bshd_engine": (
        "input_ids pre_process need_roll use_fp8_padding forced_max_seqlen"
    ),
}
"""What our engine overrides or calls of verl -> its parameters. A new one may lay tokens out in another way."""

RUN_WITH = "0.9.1"
"""The version of verl that our tests drive."""

ENGINE_MODULE = "verl.workers.engine.megatron"


class VerlError(RouterReplayError):
    """verl asks for a replay that cannot be exact here."""


class _WhenImported(MetaPathFinder, Loader):
    """Registers our engine as soon as verl's own has been imported, by whomever."""

    def __init__(self) -> None:
        self._loader: Any = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != ENGINE_MODULE:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                self._loader, spec.loader = spec.loader, self
                return spec
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module is its own loader's again, for whoever asks it for its source.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        sys.meta_path.remove(self)
        try:
            register()
        except (ImportError, AttributeError, TypeError) as error:
            import verl

            message = f"MRR806: cannot register this package's engine with verl {verl.__version__}: {error!r}."
            if verl.__version__ == RUN_WITH:
                # verl takes an ImportError here for "no Megatron", and goes on with the engine that it has registered.
                raise VerlError(message) from error
            # Without its registry nobody can say whether replay is on; where it is off, nothing is lost. A warning, not
            # a log line, so that it is seen before anyone has set logging up.
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
        """Makes verl's engine or ours, as `router_replay.mode` says; never an instance of itself."""

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            mode = replay_mode(*args, **kwargs)
            if mode == "disabled":
                return MegatronEngineWithLMHead(*args, **kwargs)
            probe(mode)
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


def probe(mode: str) -> None:
    """Raise VerlError unless what our engine overrides and calls of this verl is what it knows."""
    import verl

    for name, expected in VERL_SIGNATURES.items():
        module, _, path = name.partition(":")
        try:
            found = list(inspect.signature(operator.attrgetter(path)(importlib.import_module(module))).parameters)
        except (ImportError, AttributeError) as error:
            found = [repr(error)]
        if found != expected.split():
            raise VerlError(
                f"MRR806: router_replay.mode={mode} with verl {verl.__version__}: {path} has the parameters {found}, "
                f"this package drives one with {expected.split()}; another one may pack or split tokens differently. "
                f"Take a release of this package that knows it (this one was run with {RUN_WITH}), or set "
                "router_replay.mode=disabled."
            )


def _plug_in() -> None:
    if ENGINE_MODULE in sys.modules:
        register()
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


# Also where verl is not imported yet: it would find this module imported already, and import it no more.
_plug_in()
