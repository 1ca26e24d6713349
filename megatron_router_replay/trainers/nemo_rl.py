"""NeMo-RL: `import megatron_router_replay.trainers.nemo_rl` in the processes of its Megatron workers.

NeMo-RL's own replay is off in this process. `policy.router_replay.enabled` stays the switch, and the samples come in with the
batch of each pass. Megatron-Core is not imported before NeMo-RL imports it.
"""

from __future__ import annotations

from typing import Any

from megatron_router_replay.trainers.seams import Seam, hook, take, when_imported

OWN = "nemo_rl.models.megatron.router_replay"
BATCH = Seam(module="nemo_rl.models.megatron.data", name="get_microbatch_iterator", parameters="data")
PASS = Seam(
    module="nemo_rl.models.megatron.train",
    name="megatron_forward_backward",
    parameters="model use_router_replay",
    words="get_forward_backward_func",
)
DRIVE = tuple(
    Seam(module=OWN, name=name, parameters="model")
    for name in ("set_router_replay_forward", "set_router_replay_backward", "clear_router_replay")
)
SEAMS = (BATCH, PASS, *DRIVE)

_replays = False  # the pass that runs now
_batch: Any = None  # of the newest micro-batches


def install(**options: Any) -> None:
    """Install the replay as soon as NeMo-RL's training module is imported. Importing this module calls it.

    Args:
        options: of `mrr.replay`.
    """
    when_imported(PASS.module, lambda module: _install(options))


def _install(options: dict[str, Any]) -> None:
    from megatron.core import parallel_state

    from megatron_router_replay.trainers import follow

    replay = follow.install("NeMo-RL", lambda: _replays, options)

    def batching(original: Any) -> Any:
        def get_microbatch_iterator(data: Any, *args: Any, **kwargs: Any) -> Any:
            global _batch
            _batch = data
            return original(data, *args, **kwargs)

        return get_microbatch_iterator

    def passing(original: Any) -> Any:
        def megatron_forward_backward(model: Any, *args: Any, use_router_replay: bool = False, **kwargs: Any) -> Any:
            global _replays
            if use_router_replay:
                follow.active().enter(model, _samples)
            _replays = use_router_replay
            try:
                results = original(model, *args, use_router_replay=use_router_replay, **kwargs)
            finally:
                _replays = False
            if use_router_replay and not kwargs.get("forward_only"):
                # NeMo-RL adds up the micro-batches of all data-parallel ranks.
                follow.report(results, parts=len(results) * parallel_state.get_data_parallel_world_size())
            return results

        return megatron_forward_backward

    hook(BATCH, batching)
    hook(PASS, passing)
    for seam in DRIVE:
        hook(seam, None if replay.audits else lambda original: lambda *args, **kwargs: None)


def _samples() -> tuple[list[Any], list[Any]]:
    """Return tokens [T] and routes [T - 1, layers, topk] of each sample of the batch; -1 is NeMo-RL's row of a lost route."""
    ids, routes, lengths = take(BATCH, _batch, "input_ids", "routed_experts", "input_lengths")
    lengths = lengths.tolist()
    # The last token, which has no route, has the experts 0, 1, ..., topk - 1.
    return (
        [row[:length] for row, length in zip(ids, lengths)],
        [row[: length - 1] for row, length in zip(routes, lengths)],
    )


install()
