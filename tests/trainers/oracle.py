"""Compare the routing maps of Megatron's routers, while a trainer runs its own code, with the rollout's routes.

Nothing here uses the package under test: hooks on Megatron's modules read the tokens that enter a chunk and the routing maps
that leave its routers. Every token of a batch has an id of its own, and the id determines the route.
"""

from __future__ import annotations

import inspect
import itertools
import os
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

import megatron_router_replay as mrr
from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.trainers import replayer

LAYERS, EXPERTS, TOPK, VOCAB = 4, 16, 4, 320
SHARDS = (
    # tokens and prompts of each sample, micro-batches, by data-parallel rank
    ((7, 12, 5, 16, 9, 3), (3, 4, 2, 6, 3, 1), [[0, 2], [1], [5, 3], [4]]),
    ((11, 4, 8, 14, 9, 2), (5, 1, 2, 6, 4, 1), [[3], [4, 1, 5], [0], [2]]),
)
NUM_SAMPLES = 6
PASSES = ("no grad", "train", "recompute")
MIN_AGREEMENT = 0.0
"""Routes are random, so the router's own top-k cannot agree with them. `asked` uses the router's own."""

WEIGHTS_MOVE = True
"""Router weights change after each training forward, so that no recompute agrees with its forward by luck."""


def rollout_box(seed: int) -> dict[str, Any]:
    """Return a rank's data as the rollout managers of slime and miles store it; micro-batches differ in size."""
    ids, routes = rollout(seed)
    answers = [len(part) - prompt for part, prompt in zip(ids, SHARDS[seed % 2][1])]
    return {
        "partition": list(range(len(ids))),
        "tokens": [part.tolist() for part in ids],
        "response_lengths": answers,
        "rewards": [float(i % 2) for i in range(len(ids))],
        "truncated": [0] * len(ids),
        "loss_masks": [[1] * length for length in answers],
        "sample_indices": list(range(len(ids))),
        "rollout_ids": list(range(len(ids))),
        "rollout_mask_sums": list(answers),
        "rollout_log_probs": [[-1.0] * length for length in answers],
        "rollout_routed_experts": [part.int() for part in routes],
        "total_lengths": [len(part) for part in ids],
        "raw_reward": [float(i % 2) for i in range(len(ids))],
        "micro_batch_indices": SHARDS[seed % 2][2],
    }


class Seen:
    """Decisions by pass, compared and wrong; `mark()` begins the next part.

    A pass is "no grad", "train" or "recompute". "live" are decisions of recomputes whose tokens have no route in the rollout,
    "mtp" those of recomputes of MTP layers; they are wrong if they differ from their forward's.
    """

    def __init__(self) -> None:
        self._parts: list[Counter[tuple[str, bool]]] = [Counter()]
        self._given: Tensor | None = None

    def mark(self) -> None:
        self._parts.append(Counter())

    def count(self, name: str, wrong: Any) -> None:
        self._parts[-1][name, bool(wrong)] += 1

    def counts(self) -> list[dict[str, tuple[int, int]]]:
        """Return {pass: (compared, wrong)} of each part that compared any decision."""
        names = (*PASSES, "live", "mtp")
        return [
            {name: (part[name, False] + part[name, True], part[name, True]) for name in names}
            for part in self._parts
            if part
        ]

    def give(self, tokens: Tensor) -> None:
        """Set the tokens of the next forwards, for a trainer whose later pipeline stages get none."""
        self._given = tokens.clone()

    def tokens(self, given: Any) -> Tensor:
        tokens = self._given if self._given is not None else given
        assert isinstance(tokens, Tensor), "a stage without input_ids, and `give` was not called"
        return tokens.clone()


def rollout(seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Return tokens [T], all different and none 0, and an engine's routes [T - 1, LAYERS, TOPK] of each sample."""
    generator = torch.Generator().manual_seed(seed)
    lengths = SHARDS[seed % 2][0]
    ids = list((torch.randperm(VOCAB - 1, generator=generator)[: sum(lengths)] + 1).split(lengths))
    routes = [torch.rand(len(i) - 1, LAYERS, EXPERTS, generator=generator).argsort(dim=2)[:, :, :TOPK] for i in ids]
    for part in routes:
        part[:, 0] = 0  # layer 1 is dense
    return ids, routes


def one(at: int, change: Any) -> Any:
    """Return an attack on one sample."""
    return lambda parts: [change(part) if i == at else part for i, part in enumerate(parts)]


def each(change: Any) -> Any:
    return lambda parts: [change(part) for part in parts]


def without_rows(part: Tensor, at: slice) -> Tensor:
    part = part.clone()
    part[at] = 0
    return part


MOVES: dict[str, Any] = {
    "late": each(lambda part: torch.cat([part[:1], part[:-1]])),
    "early": each(lambda part: torch.cat([part[1:], part[-1:]])),
    "reversed": each(lambda part: part.flip(0)),
    "exchanged": lambda parts: [parts[1], parts[0], *parts[2:]],
    "zeros": one(2, torch.zeros_like),
    "two rows of zeros": one(2, partial(without_rows, at=slice(50, 52))),
    "half of the rows": one(1, lambda part: part[: len(part) // 2]),
    "no first row": one(0, lambda part: part[1:]),
}
ATTACKS = MOVES | {
    "no rows": one(1, lambda part: part[:0]),
    "shifted layers": each(lambda part: part.roll(1, dims=1)),
    "shifted layers, none of them dense": each(lambda part: part[:, 1:].roll(1, dims=1)),
}
"""Faults of a rollout's rows of six samples, before the trainer receives them."""


def asked(step: Any, attack: str, *args: Any) -> None:
    """Run a trainer's step, with agreement checked, on long samples with the model's own routes and one attack."""
    from tests.trainers import small_model  # which imports this module

    chunks: list[Any] = []
    build = small_model.build

    def built(*options: Any, **named: Any) -> list[Any]:
        chunks[:] = build(*options, **named)
        return list(chunks)

    @cache  # asked for again where the model is watched
    def own_rollout(seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        ids = [torch.randint(1, VOCAB, (200,), generator=generator) for _ in range(NUM_SAMPLES)]
        return ids, ATTACKS.get(attack, list)([own_routes(chunks, part)[:-1] for part in ids])

    module = sys.modules[__name__]
    with (
        mock.patch.object(small_model, "build", built),
        mock.patch.object(module, "rollout", own_rollout),
        mock.patch.multiple(module, MIN_AGREEMENT=0.25, WEIGHTS_MOVE=False),
    ):
        step(*args)


def own_routes(chunks: list[Any], ids: Tensor) -> Tensor:
    """Return the experts that the model's routers choose for a sample, [T, LAYERS, topk]."""
    from megatron.core.transformer.moe.router import TopKRouter

    topk = chunks[0].config.moe_router_topk
    routes = torch.zeros(len(ids), LAYERS, topk, dtype=torch.int64)

    def keep(router: Any, args: Any, output: Any) -> None:
        routes[:, router.layer_number - 1] = output[1].nonzero()[:, 1].view(-1, topk)

    handles = [each.register_forward_hook(keep) for each in chunks[0].modules() if isinstance(each, TopKRouter)]
    with torch.no_grad():
        chunks[0](
            input_ids=ids.unsqueeze(0),
            position_ids=torch.arange(len(ids)).unsqueeze(0),
            attention_mask=None,
            packed_seq_params=None,
        )
    for handle in handles:
        handle.remove()
    return routes


def routes_of_tokens(ids: list[Tensor], routes: list[Tensor]) -> dict[int, Tensor]:
    """Return the route [LAYERS, TOPK] of each token that has one."""
    return {int(token): route for tokens, part in zip(ids, routes) for token, route in zip(tokens, part)}


FINDINGS: list[Any] = []
"""Findings of each pass of the newest audited process."""


@contextmanager
def process(*, plants: bool = False) -> Iterator[None]:
    """End a trainer's process with the block: restore the environment and Megatron-Core's classes, uninstall the hooks.

    Args:
        plants: Megatron-Core's RouterReplay gets one wrong row.
    """
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
    from megatron.core.transformer import attention
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))
        stack.enter_context(torch._dynamo.config.patch(disable=True))
        # What trainers and their hooks replace.
        for owner in (TopKRouter, RouterReplay, MultimodalRotaryEmbedding, rope_utils, attention):
            stack.callback(_restore, owner, dict(vars(owner)))
        stack.callback(RouterReplay.global_router_replay_instances.clear)
        if plants:
            RouterReplay.set_target_indices = planting(RouterReplay.set_target_indices)  # type: ignore[method-assign]
        try:
            yield
        finally:
            if replayer.is_installed():
                FINDINGS[:] = getattr(replayer.active(), "findings", [])
            replayer.uninstall()


def _restore(owner: Any, before: dict[str, Any]) -> None:
    """Give a class or a module the attributes that it had before."""
    for name, value in list(vars(owner).items()):
        if name not in before:
            delattr(owner, name)
        elif value is not before[name]:
            setattr(owner, name, before[name])


def unused_tokens(seed: int) -> list[int]:
    """Return tokens that no sample of a rank has, for padding; 0 is not among them."""
    used = {int(token) for part in rollout(seed)[0] for token in part}
    return sorted(set(range(1, VOCAB)) - used)


def audited(step: Any, word: str, *args: Any) -> tuple[Any, list[Any]]:
    """Run a trainer with its own replay under MRR_AUDIT=word; return this oracle's counts and the audit's findings."""
    with mock.patch.dict(os.environ, MRR_AUDIT=word):
        return step(*args), list(FINDINGS)


def planting(original: Any) -> Any:
    """Return a trainer's method that takes routes, with one wrong expert for the third token of its first call."""
    calls = itertools.count()

    def take(self: Any, topk_indices: Tensor) -> None:
        if next(calls) == 0:
            topk_indices = topk_indices.clone()
            topk_indices[2, 0] = min(set(range(EXPERTS)) - set(topk_indices[2].tolist()))
        original(self, topk_indices)

    return take


class ModelError(Exception):
    """A trainer builds its model."""


def build_model(*args: Any, **kwargs: Any) -> Any:
    """Replace a trainer's function that builds its model."""
    raise ModelError


def starting(start: Any, *args: Any, **kwargs: Any) -> str:
    """Run a trainer's own set-up until it builds the model; return the trainer whose hooks are installed by then."""
    try:
        start(*args, **kwargs)
    except ModelError:
        assert hasattr(schedules.get_forward_backward_func, "mrr_original")
        return replayer.active().trainer
    raise AssertionError("no model was built")


def tracked(step: Any, folder: str, to: str) -> None:
    """Run a trainer's step with its own tracker, which writes TensorBoard's files to a folder."""
    from torch.utils.tensorboard import SummaryWriter

    original = SummaryWriter.add_scalar

    def add_scalar(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.flush()

    with mock.patch.dict(os.environ, TENSORBOARD_DIR=to), mock.patch.object(SummaryWriter, "add_scalar", add_scalar):
        step(folder, ParallelSizes(), {}, {"use_tensorboard": True})


@contextmanager
def watched(chunks: list[Any], route_of: dict[int, Tensor]) -> Iterator[Seen]:
    """Yield the counts of these chunks' routers."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import TopKRouter

    seen = Seen()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    handles, undo = [], []
    for chunk in chunks:
        model = chunk
        while hasattr(model, "module"):
            model = model.module
        now: list[Tensor] = []
        again: dict[Any, deque[tuple[Tensor, Tensor]]] = defaultdict(deque)
        named = [(name, module) for name, module in model.named_modules() if isinstance(module, TopKRouter)]
        routers, mtp = [router for _, router in named], {router for name, router in named if name.startswith("mtp.")}
        generator = torch.Generator().manual_seed(0)  # the same on all ranks that share a router

        def enter(module: Any, args: Any, kwargs: Any, now: list[Tensor] = now) -> None:
            if torch._C._current_graph_task_id() != -1:
                return
            tokens = seen.tokens(kwargs.get("input_ids", args[0] if args else None))
            if hasattr(module, "tokens_of_layers"):  # a multimodal model, which may pack and split inside
                tokens = module.tokens_of_layers(tokens, kwargs.get("attention_mask"), kwargs.get("packed_seq_params"))
            at = tokens.t().reshape(-1)  # s-major; tensor-parallel ranks share s
            now[:] = [at.chunk(tp_size)[tp_rank] if tp_size > 1 else at]

        def leave(module: Any, *_: Any, routers: Any = routers, generator: Any = generator) -> None:
            if module.training and torch._C._current_graph_task_id() == -1 and WEIGHTS_MOVE:
                for router in routers:
                    router.weight.data.copy_(torch.randn(router.weight.shape, generator=generator))

        def routed(
            router: Any, args: Any, output: Any, now: list[Tensor] = now, again: Any = again, mtp: set[Any] = mtp
        ) -> None:
            routing_map, has_route = output[1], ({} if router in mtp else route_of)
            if torch._C._current_graph_task_id() != -1:
                # A chunk's micro-batches are recomputed in the order of their forwards.
                phase, (tokens, first) = "recompute", again[router].popleft()
                for token, its_own, chosen in zip(tokens.tolist(), first, routing_map):
                    if token not in has_route:
                        seen.count("mtp" if router in mtp else "live", not torch.equal(its_own, chosen))
            else:
                phase, tokens = "train" if router.training else "no grad", now[0]
                if phase == "train":
                    again[router].append((tokens, routing_map.clone()))
            assert len(routing_map) == len(tokens), (list(routing_map.shape), list(tokens.shape))
            for token, chosen in zip(tokens.tolist(), routing_map):
                if token in has_route:
                    expected = torch.zeros_like(chosen)
                    expected[route_of[token][router.layer_number - 1].long()] = True
                    seen.count(phase, not torch.equal(expected, chosen))

        if hasattr(model, "build_schedule_plan"):  # a HybridModel has none

            def plan(
                *args: Any,
                model: Any = model,
                build: Any = model.build_schedule_plan,
                enter: Any = enter,
                **kwargs: Any,
            ) -> Any:
                enter(model, args, kwargs)  # its layers run later, and not in a forward of the model
                return build(*args, **kwargs)

            model.build_schedule_plan = plan
            undo.append((model, "build_schedule_plan"))
        handles += [model.register_forward_pre_hook(enter, with_kwargs=True), model.register_forward_hook(leave)]
        handles += [router.register_forward_hook(routed) for router in routers]
    nobody_asks = mock.patch.dict(inspect.unwrap(mrr.replay).__kwdefaults__, min_agreement=MIN_AGREEMENT)
    try:
        with nobody_asks:
            yield seen
    finally:
        for handle in handles:
            handle.remove()
        for model, name in undo:
            delattr(model, name)


def check_replayed(ranks: Any, *, recomputes: bool, mtp: bool = False) -> None:
    """Check each rank's live pass, log-prob pass and training passes: all replayed decisions are the rollout's.

    Args:
        recomputes: routers run again in the backward; those of MTP layers too if there are any, `mtp`.
    """
    for live, log_probs, *train in ranks:
        decisions, differ = live["no grad"]
        assert differ > 0.9 * decisions > 0, "the live pass differs, so the replayed ones show something"
        assert log_probs["no grad"][0] > 0
        looked, wrong = (
            {name: sum(part[name][i] for part in train) for name in (*PASSES, "live", "mtp")} for i in range(2)
        )
        # The forward of a full recompute has no gradients.
        assert looked["no grad"] + looked["train"] > 0
        assert (looked["recompute"] > 0) == (looked["live"] > 0) == recomputes
        assert (looked["mtp"] > 0) == (recomputes and mtp)
        assert log_probs["no grad"][1] == 0
        assert set(wrong.values()) == {0}
