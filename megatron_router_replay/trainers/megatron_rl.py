"""Megatron-LM's RL loop: `torchrun ... -m megatron_router_replay.trainers.megatron_rl train_rl.py ...`, or an import of this
module at the top of the script.

With `--moe-enable-routing-replay`, Megatron-RL's engine records the experts of each request, and its training ignores them.
Here each rank of the engine keeps the routes of its requests. Megatron-RL sends a record of each finished request to all
ranks; a ticket in it names the request's routes. Before the pass for old log-probs, each rank fetches the routes of the
samples that it trains. That pass and the training step replay; the pass of the reference model does not.
"""

from __future__ import annotations

import logging
import math
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.errors import PayloadError
from megatron_router_replay.trace import RoutingTrace
from megatron_router_replay.trace.ids import index_dtype
from megatron_router_replay.trainers import replayer
from megatron_router_replay.trainers.request_routes import Piece, RequestRoutes, Ticket
from megatron_router_replay.trainers.seams import Seam, bind, hook, when_imported

_LOG = logging.getLogger(__name__)

RL = "megatron.rl.rl_utils"
ENGINE = Seam(RL, "get_inference_interface", "model", words="MegatronLocal")
FINISH = Seam(
    "megatron.core.inference.engines.dynamic_engine",
    "DynamicInferenceEngine.post_process_requests",
    "self",
    words="routing_indices finished_request_records",
)
RECORD = Seam(
    "megatron.core.inference.inference_request",
    "FinishedRequestRecord.from_request",
    "request",
    words="policy_epoch",
)
PREPARE = Seam(
    RL,
    "prepare_data_for_update",
    "model rollouts tokenizer request_ledger",
    words="prepare_trajectories pack_all_trajectories compute_logprobs_batch compute-old-logprobs compute-ref-logprobs",
)
ROWS = Seam(RL, "prepare_trajectories", words="trajectory generation_mask pad")
LOGPROBS = Seam(RL, "compute_logprobs_batch", "model packing_context forward_backward_func")
PACK = Seam("megatron.rl.sequence_packing_utils", "pack_all_trajectories", words="bin_seq_indices all_gather")
STEP = Seam("megatron.training.training", "train_step", "model forward_backward_func", words="losses_reduced")
SEAMS = (ENGINE, FINISH, RECORD, PREPARE, ROWS, LOGPROBS, PACK, STEP)

_store = RequestRoutes()
_collections: list[_Collection] = []
"""One collection while `prepare_data_for_update` runs, none otherwise."""


def install(**options: Any) -> None:
    """Install the hooks as soon as their modules are imported. Importing this module calls it.

    Args:
        options: of `mrr.replay`.
    """
    # Wait until Megatron-RL is imported: a process that does not run it may have a Megatron-Core without these functions.
    when_imported(RL, lambda module: _hook_all(options))


def _hook_all(options: dict[str, Any]) -> None:
    replayer.install("Megatron-RL", None, options)
    hook(ENGINE, _generate)
    hook(FINISH, _finish)
    hook(RECORD, _record)
    hook(PREPARE, _prepare)
    hook(ROWS, _note_rows)
    hook(LOGPROBS, _log_probs)
    hook(PACK)  # only checked: `_packed_rows` relies on its order
    hook(STEP, _step)


def _is_on(model: Any) -> bool:
    from megatron_router_replay.mcore.model.find import as_chunks, unwrap

    config: Any = unwrap(as_chunks(model)[0]).config
    return bool(config.moe_enable_routing_replay)


def _routed_layers(model: Any) -> dict[int, Any]:
    """Return layer number -> router of this rank's MoE layers, without MTP layers and hash routers."""
    from megatron_router_replay.mcore.model.find import as_chunks, find_routers
    from megatron_router_replay.mcore.model.support import is_hashed

    found = [each for chunk in as_chunks(model) for each in find_routers(chunk)]
    return {each.layer_number: each.router for each in found if not each.is_mtp and not is_hashed(each.router)}


# ---- the engine
def _generate(original: Any, *args: Any, **kwargs: Any) -> Any:
    model = bind(original, *args, **kwargs).arguments["model"]
    if _is_on(model):
        from megatron.core.transformer.moe.router_replay import RouterReplay

        # The engine records all routers in this list. If it generates with a copy of the model, the list also has the
        # trained model's: keep those of the engine's model.
        layers = _routed_layers(model)
        RouterReplay.global_router_replay_instances[:] = [router.router_replay for router in layers.values()]
        _store.layers = tuple(layers)
    return original(*args, **kwargs)


def _finish(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep the routes of requests that are finished now, on each rank of the engine."""
    result = original(self, *args, **kwargs)
    config = self.controller.inference_wrapped_model.model.config
    # Only Megatron-RL turns the ledger of finished requests on.
    if config.moe_enable_routing_replay and getattr(self, "local_metadata_ledger_enabled", False):
        _store.engine = min(dist.get_process_group_ranks(self.pg_collection.mp))
        for record in result[1]:
            _keep(record, config)
    return result


def _keep(record: Any, config: Any) -> None:
    """Take the routes of a finished request."""
    first = record.requests[0]
    routes = first.routing_indices
    # With them, an HTTP reply of the engine would have the routes as text, twice.
    for each in record.requests:
        each.routing_indices = None
    # A request that was evicted or suspended was prefilled again, and the engine did not record all of its forwards: keep
    # no routes, so that its tokens are routed live.
    if len(record.requests) > 1 or (routes is None and _store.layers):
        return
    tokens = torch.cat([_ids(first.prompt_tokens), _ids(first.generated_tokens)])
    if routes is None:  # a pipeline stage without routers
        routes = torch.empty(len(tokens) - 1, 0, config.moe_router_topk, dtype=torch.uint8)
    _store.keep(first.request_id, tokens, torch.as_tensor(routes), num_experts=config.num_moe_experts)


def _record(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Let the record of a finished request carry its ticket. Called on one rank of each engine."""
    from_request = original.__get__(None, sys.modules[RECORD.module].FinishedRequestRecord)  # a classmethod
    record = from_request(*args, **kwargs)
    record.mrr_ticket = _store.ticket(bind(from_request, *args, **kwargs).arguments["request"].request_id)
    return record


def _ids(tokens: Any) -> Tensor:
    return torch.as_tensor(tokens).detach().cpu().to(torch.int32).flatten()


# ---- from a rollout to its rows
class _Row(NamedTuple):
    """A row of training: the index of its rollout in the collection, and of its turn; -1: all turns, joined."""

    rollout: int
    turn: int


class _Collection:
    """The rollouts of a call of `prepare_data_for_update`, until this rank has the routes of its samples.

    Args:
        model: the trained model's chunks.
        rollouts: Megatron-RL's, in groups, the same on all ranks.
        ledger: completion id -> record, the same on all ranks. Megatron-RL removes a record when it reads it: read them now.
        tokenizer: Megatron-RL's.
    """

    def __init__(self, model: Any, rollouts: Any, ledger: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.has_entered = False
        self.rows: list[Any] = []
        """The rows of this rank before they are packed, as Megatron-RL has them."""
        self._rollouts = [each for group in rollouts for each in group]
        self._oldest = _store.collection - _num_kept_collections()
        self._tickets: list[list[Ticket | None]] = [
            [self._ticket(ledger.get(name)) for name in getattr(each, "completion_ids", None) or ()]
            for each in self._rollouts
        ]

    def _ticket(self, record: Any) -> Ticket | None:
        ticket: Ticket | None = getattr(record, "mrr_ticket", None)
        return ticket if ticket is not None and ticket.collection >= self._oldest else None

    def trace(self, packing_context: Any) -> RoutingTrace:
        """Return the samples that this rank trains, with the layers of its stage. A collective over all ranks."""
        rows = replayer.make_together(self._checked_rows)
        if packing_context is not None:
            rows = _packed_rows(rows, packing_context)
        trace = self._fetch(list(dict.fromkeys(row for row in rows if row is not None)))
        _store.forget([each for turns in self._tickets for each in turns if each is not None], before=self._oldest)
        _store.collection += 1
        return trace

    def _checked_rows(self) -> list[_Row | None]:
        self._check_tokens()
        return self._local_rows()

    def _check_tokens(self) -> None:
        """Check that requests have the tokens of their rollouts, on the ranks that have their routes."""
        if not any(ticket is not None for turns in self._tickets for ticket in turns):
            raise PayloadError(
                "MRR802: no request of this rollout has routes. Were all of them evicted or suspended "
                "(--rl-kv-cache-management-mode recompute), or do rollouts come without completion ids? Those that a restart "
                "recovers from a rollout bank (--rl-durable-rollout-bank) have none: move its folder away."
            )
        for i, (rollout, tickets) in enumerate(zip(self._rollouts, self._tickets)):
            if tickets and len(tickets) != len(rollout.trajectory):
                raise PayloadError(
                    f"MRR802: rollout {i} has {len(rollout.trajectory)} turns and {len(tickets)} completion ids."
                )
            for turn, ticket in enumerate(tickets):
                if ticket is not None:
                    _store.check_tokens(ticket, _ids(rollout.trajectory[turn]), f"rollout {i}, turn {turn}")

    def _local_rows(self) -> list[_Row | None]:
        """Return the rows of this rank before they are packed; None: a row of padding."""
        places = {id(rollout): i for i, rollout in enumerate(self._rollouts)}
        rows: list[_Row | None] = []
        for each in self.rows:
            rollout, turn = each if isinstance(each, tuple) else (each, -1)
            if rollout is not None and id(rollout) not in places:
                raise ROWS.moved(f"gets rows of a {type(rollout).__name__} that is not of this collection")
            rows.append(None if rollout is None else _Row(places[id(rollout)], turn))
        return rows

    def _tokens(self, row: _Row) -> Tensor:
        turn = self._rollouts[row.rollout].trajectory[row.turn]  # the last turn has the tokens of all earlier ones
        return _ids(self.tokenizer.tokenize(turn) if isinstance(turn, str) else turn)

    def _pieces(self, row: _Row) -> Iterator[Piece]:
        """Yield the parts of a row's routes. A turn has the tokens of earlier turns again; a token keeps its first routes."""
        tickets, turns = self._tickets[row.rollout], self._rollouts[row.rollout].trajectory
        end = 0
        for turn, ticket in enumerate(tickets):
            if row.turn not in (-1, turn):
                continue
            if ticket is not None and len(turns[turn]) - 1 > end:
                yield Piece(ticket, end, len(turns[turn]) - 1)
                end = len(turns[turn]) - 1

    def _fetch(self, rows: Sequence[_Row]) -> RoutingTrace:
        """Return the trace of these rows. A collective over all ranks."""
        from megatron_router_replay.mcore.model.find import as_chunks, unwrap

        config: Any = unwrap(as_chunks(self.model)[0]).config
        experts, topk, layers = config.num_moe_experts, config.moe_router_topk, list(_routed_layers(self.model))
        pieces = [(i, piece) for i, row in enumerate(rows) for piece in self._pieces(row)]
        parts = _store.fetch([piece for _, piece in pieces], layers, topk=topk, num_experts=experts)
        # A trace needs a sample: if all rows of this rank are padding, it is a single padding token without routes.
        tokens = [self._tokens(row) for row in rows] or [torch.tensor([self.tokenizer.pad])]
        routes = [torch.zeros(len(ids), len(layers), topk, dtype=index_dtype(experts)) for ids in tokens]
        masks = [torch.zeros(len(ids), dtype=torch.bool) for ids in tokens]
        for (i, piece), part in zip(pieces, parts):
            routes[i][piece.begin : piece.end], masks[i][piece.begin : piece.end] = part, True
        return RoutingTrace.from_samples(
            tokens, routes, num_experts=experts, layer_numbers=layers, replay_mask=masks, last_token="unrouted"
        )


def _packed_rows(rows: list[_Row | None], packing_context: Any) -> list[_Row | None]:
    """Return the rows in the bins of this rank. A collective over data-parallel ranks, as the packing is."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, rows, group=group)
    of_all = [row for part in parts for row in part]
    return [of_all[i] for indices in packing_context.packing_info.bin_seq_indices for i in indices]


def _num_kept_collections() -> int:
    """Return for how many collections the routes of a request are kept, until its rollout is trained.

    Requests of evaluations and of groups that are filtered out are never trained, and Megatron-RL does not say which these
    are. It trains a rollout `rl_generation_lag` collections late. If one is later than twice that and 8 more, its tokens are
    routed live, and the report counts them.
    """
    lag = getattr(sys.modules[RL].get_args(), "rl_generation_lag", None)
    return 2 * math.ceil(lag or 0) + 8


# ---- all ranks that train
def _prepare(original: Any, *args: Any, **kwargs: Any) -> Any:
    given = bind(original, *args, **kwargs).arguments
    if not _is_on(given["model"]):
        return original(*args, **kwargs)
    from megatron.core.transformer.moe.router_replay import RouterReplay

    # If engine and training share a model, its routers still have the engine's action, RECORD, and its buffers. The engine
    # sets both again before each of its steps.
    RouterReplay.clear_global_router_replay_action()
    RouterReplay.clear_global_static_buffers()
    _collections[:] = [_Collection(given["model"], given["rollouts"], given["request_ledger"], given["tokenizer"])]
    try:
        return original(*args, **kwargs)
    finally:
        _collections.clear()


def _note_rows(original: Any, *args: Any, **kwargs: Any) -> Any:
    rows, *_ = bind(original, *args, **kwargs).arguments.values()
    for collection in _collections:
        collection.rows = list(rows)
    return original(*args, **kwargs)


def _log_probs(original: Any, *args: Any, **kwargs: Any) -> Any:
    collection = next(iter(_collections), None)
    if collection is None or collection.has_entered:  # the second pass is the reference model's
        return original(*args, **kwargs)
    collection.has_entered = True
    given, replay = bind(original, *args, **kwargs).arguments, replayer.active()
    # Megatron-RL sets the token of padding while it prepares rows.
    replay.padding_token_ids = [collection.tokenizer.pad]
    replay.enter_trace(lambda: collection.trace(given["packing_context"]), are_trained=True)
    _LOG.info("%d bytes of routes came from other ranks", _store.bytes_received)
    with replay.in_session(given["model"]):  # for all micro-batches together: one may be all padding
        return original(*args, **kwargs)


def _step(original: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_on(bind(original, *args, **kwargs).arguments["model"]):
        return original(*args, **kwargs)
    replay = replayer.active()
    with replay.in_pass("replay"):
        result = original(*args, **kwargs)
    if result[0]:  # empty on pipeline stages that log nothing
        # Megatron-LM's log reads tensors.
        result[0].update({name: torch.tensor(value) for name, value in replay.metrics.items()})
    return result


def run(arguments: Sequence[str]) -> None:
    """Run a script with its arguments, as Python does."""
    sys.argv[:] = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    from megatron_router_replay.trainers import megatron_rl  # which installs the hooks

    megatron_rl.run(sys.argv[1:])
else:
    install()
