"""ROLL: RAY_RUNTIME_ENV_HOOK=megatron_router_replay.trainers.roll.runtime_env in the environment that starts it.

ROLL's `router_replay.mode: R3` stays the switch, and the samples come in with the batch of a pass, in which ROLL's own replay
is off. Megatron-Core is not imported before ROLL imports it.

Source: ROLL 8eb27cc2, distributed/strategy/megatron_strategy.py and utils/functionals.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from megatron_router_replay.errors import PayloadError, ReplayStateError
from megatron_router_replay.trainers import replayer
from megatron_router_replay.trainers.seams import Seam, bind, hook, take, when_imported

FIELD = "routed_experts"
STRATEGY = "roll.distributed.strategy.megatron_strategy"
COLLATE = Seam("roll.utils.functionals", "postprocess_generate", FIELD, words="attention_mask")
SCHEDULE = Seam(STRATEGY, "MegatronTrainStrategy.initialize", words="forward_backward_func get_forward_backward_func")
FORWARD, TRAINING = (
    Seam(STRATEGY, name, "self batch", words=f"{FIELD} enable_router_replay forward_backward_func")
    for name in ("MegatronInferStrategy.forward_step", "MegatronTrainStrategy.train_step")
)
INNER = Seam(
    STRATEGY, "MegatronInferStrategy.inner_forward_step", words=f"input_ids attention_mask {FIELD} enable_router_replay"
)
SEAMS = (COLLATE, SCHEDULE, FORWARD, TRAINING, INNER)


def runtime_env(runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a Ray job's environment in which each worker process calls `install`; Ray calls this from `ray.init`.

    Raises:
        ReplayStateError: it has a hook of its own, which Ray would not call.
    """
    environment, setup = dict(runtime_env or {}), f"{__name__}.install"
    if environment.setdefault("worker_process_setup_hook", setup) != setup:
        raise ReplayStateError(
            f"MRR806: this job has the worker_process_setup_hook {environment['worker_process_setup_hook']}: call {setup} in "
            f"it, and leave RAY_RUNTIME_ENV_HOOK={__name__}.runtime_env out."
        )
    return environment


def install(**options: Any) -> None:
    """Install the hooks as soon as their modules are imported. Importing this module calls it.

    Args:
        options: of `mrr.replay`.
    """
    hook(COLLATE, _collate)
    when_imported(STRATEGY, lambda module: replayer.install("ROLL", None, options))
    hook(FORWARD, _run_forward)
    hook(TRAINING, _run_training)
    hook(SCHEDULE)
    hook(INNER)


# ---- the rollout's process
def _collate(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise where a sample of a generation has fewer rows of routes than ROLL's `postprocess_generate` keeps tokens."""
    batch = original(*args, **kwargs)
    rows = bind(original, *args, **kwargs).arguments.get(FIELD)
    if rows is not None:
        (mask,) = take(COLLATE, dict(batch.batch.items()), "attention_mask")
        for i, (length, part) in enumerate(zip(mask.sum(dim=1).tolist(), rows, strict=True)):
            # ROLL logs a warning, and fills up with zeros, which are routes of expert 0 where topk is 1.
            if len(part) < length - 1:
                raise PayloadError(
                    f"MRR802: sample {i} has {length} tokens, and {len(part)} rows of routes, with {length - 1} rows at "
                    "least: the engine did not return those of its whole prompt and response."
                )
    return batch


# ---- the workers
def _run_forward(original: Any, *args: Any, **kwargs: Any) -> Any:
    return _run_pass(bind(original, *args, **kwargs), original)


def _run_training(original: Any, *args: Any, **kwargs: Any) -> Any:
    results = _run_pass(bind(original, *args, **kwargs), original)
    replayer.active().add_metrics([results])  # ROLL takes the mean
    return results


def _run_pass(call: inspect.BoundArguments, original: Any) -> Any:
    """Run a pass of ROLL's strategy, whose batch has routes if it replays."""
    self, fields = call.arguments["self"], dict(call.arguments["batch"].batch.items())
    # A reference's batch has no routes; ROLL itself raises where one that trains has none.
    if not self.enable_router_replay or FIELD not in fields:
        return original(*call.args, **call.kwargs)
    replay = replayer.active()
    replay.enter(self.model.get_models(), lambda: _samples(fields))
    replay.padding_token_ids = _padding_tokens(fields)
    with replay.in_pass("replay"), _own_replay(self, is_on=replay.audits):
        return original(*call.args, **call.kwargs)


@contextmanager
def _own_replay(strategy: Any, *, is_on: bool) -> Iterator[None]:
    """Turn a strategy's own replay on or off for a pass."""
    before = strategy.enable_router_replay
    strategy.enable_router_replay = is_on
    try:
        yield
    finally:
        strategy.enable_router_replay = before


def _samples(fields: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return tokens [T] and routes [T - 1, layers, topk] of each sample; ROLL's last row is zeros."""
    tokens, routes = [], []
    for row, mask, rows in zip(*(each.cpu() for each in take(INNER, fields, "input_ids", "attention_mask", FIELD))):
        is_real = mask.bool()
        tokens.append(row[is_real])
        routes.append(rows[is_real][:-1])
    return tokens, routes


def _padding_tokens(fields: Mapping[str, Tensor]) -> list[int]:
    """Return the tokens past the samples, which need not be the tokenizer's, and 0, which ROLL packs sequences with."""
    ids, mask = take(INNER, fields, "input_ids", "attention_mask")
    return sorted({0, *ids[~mask.bool()].unique().tolist()})


install()
