"""A model chunk of real Megatron-Core TopKRouters and nothing else of Megatron: it forwards and backwards in milliseconds.

The last channel of the hidden state carries the number of the forward, unchanged from layer to layer. `watched` reads it
where a router is entered, together with the routing map that leaves it: so a test knows the forward of a recompute without
the package.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import megatron_router_replay as mrr
from megatron_router_replay.mcore.core.tape import Entry

HIDDEN, EXPERTS, TOPK, VOCAB = 8, 8, 2, 32
ROWS = torch.arange(8).view(2, 4)
"""The rows of `tokens()`: two sequences of four."""


def config(kind: Any = None, **options: Any) -> Any:
    """A TransformerConfig, or one of a subclass."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields: dict[str, Any] = {
        "num_layers": 3,
        "hidden_size": HIDDEN,
        "num_attention_heads": 1,
        "num_moe_experts": EXPERTS,
        "moe_router_topk": TOPK,
        "moe_router_load_balancing_type": "none",
        "perform_initialization": False,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
    }
    return (kind or TransformerConfig)(**{**fields, **options})


def _gating(router: Any, hidden: Tensor) -> Tensor:
    return nn.functional.linear(hidden, router.weight)


class Dispatcher:
    """The part of a token dispatcher that a session checks: it gets the outputs of the layer's router."""

    def dispatch_preprocess(self, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        self.routing_map = routing_map
        return hidden, probs


class Layer(nn.Module):
    def __init__(self, the_config: Any, layer_number: int, generator: torch.Generator) -> None:
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.moe.router import TopKRouter

        super().__init__()
        groups = ProcessGroupCollection()
        for name in ("tp", "cp", "tp_cp", "tp_dp_cp"):
            setattr(groups, name, None)
        self.router = TopKRouter(the_config, groups)
        self.router.weight.data = torch.randn(EXPERTS, HIDDEN, generator=generator)
        self.router.weight.data[:, -1] = 0  # the forward's number decides nothing
        self.router.set_layer_number(layer_number)
        # Megatron-Core's own moves the weight to a GPU.
        self.router.gating = functools.partial(_gating, self.router)
        self.router_args: tuple[Any, ...] = ()  # a padding_mask
        self.token_dispatcher = Dispatcher()
        self.experts = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator) / HIDDEN)

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        routed: tuple[Tensor, Tensor] = self.router(hidden, *self.router_args)
        return routed

    def forward(self, hidden: Tensor) -> Tensor:
        probs, routing_map = self.route(hidden)
        _, probs = self.token_dispatcher.dispatch_preprocess(hidden, routing_map, probs)
        routing_map = self.token_dispatcher.__dict__.pop("routing_map")
        outputs = torch.einsum("sbh,ehk->sbek", hidden, self.experts).tanh()
        mixed = (outputs * (probs * routing_map).view(*hidden.shape[:2], EXPERTS, 1)).sum(dim=2)
        keep = torch.arange(HIDDEN, device=hidden.device) < HIDDEN - 1
        return hidden + mixed * keep


def bare(cls: Any, **attributes: Any) -> Any:
    """Return a module of this class that was never built, as one that needs a whole GPTModel."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


Around = Callable[[Callable[..., Tensor], Tensor], Tensor]
"""How a layer is called: (layer, hidden) -> hidden; plain, or inside a checkpoint."""


class Chunk(nn.Module):
    """input_ids [b, s] -> logits [s, b, VOCAB]."""

    def __init__(self, num_layers: int = 3, seed: int = 0, **options: Any) -> None:
        super().__init__()
        self.config = config(**options)
        generator = torch.Generator().manual_seed(seed)
        self.embedding = nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator))
        self.layers = nn.ModuleList(Layer(self.config, number + 1, generator) for number in range(num_layers))
        self.around: Around = plain
        self.number = 0  # of the next forward
        self.fail_at: int | None = None  # the layer before which the next forward fails

    def forward(
        self,
        input_ids: Tensor,
        number: int | None = None,
        packed_seq_params: Any = None,
        position_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        inference_context: Any = None,
        inference_params: Any = None,
    ) -> Tensor:
        number = self.number if number is None else number
        hidden = self.embedding[torch.atleast_2d(input_ids).t()]
        hidden = torch.cat([hidden[..., :-1], torch.full_like(hidden[..., -1:], float(number))], dim=-1)
        for position, layer in enumerate(self.layers):
            if self.fail_at == position:
                self.fail_at = None
                raise ArithmeticError("injected")
            hidden = self.around(layer, hidden)
        return hidden[..., :-1] @ self.embedding[:, :-1].t()

    @property
    def routers(self) -> list[Any]:
        return [layer.router for layer in self.layers]


def plain(layer: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    return layer(hidden)


def reentrant(layer: Callable[..., Tensor], *inputs: Any) -> Tensor:
    return checkpoint(layer, *inputs, use_reentrant=True)


def non_reentrant(layer: Callable[..., Tensor], *inputs: Any) -> Tensor:
    return checkpoint(layer, *inputs, use_reentrant=False)


AROUND: dict[str, Around] = {"plain": plain, "reentrant": reentrant, "non_reentrant": non_reentrant}
SCORES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "pre_softmax": {"moe_router_pre_softmax": True},
    "sigmoid": {"moe_router_score_function": "sigmoid"},
    "sigmoid in groups": {
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 3,
    },
}


def with_gradients(layer: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A layer that turns gradients on again, as some that train inside a frozen model do."""

    def forward(hidden: Tensor) -> Tensor:
        with torch.enable_grad():
            return layer(hidden)

    return forward


TRANSFORMER_ENGINE = "transformer_engine.pytorch.distributed"


class _CheckpointFrame:
    """State of Transformer Engine's non-reentrant checkpoint from its forward to its recompute."""

    def __init__(self, recompute_fn: Callable[..., Any], get_rng_state_tracker: Any) -> None:
        self.recompute_fn = recompute_fn
        self.count = 0
        self.recomputed: list[Tensor] = []


class _recomputation_hook(saved_tensors_hooks):  # noqa: N801  # its name there
    def __init__(self, frame: _CheckpointFrame) -> None:
        def pack_hook(x: Tensor) -> Tensor:
            frame.recomputed.append(x.detach())
            return x.detach()

        super().__init__(pack_hook, lambda x: x)


class _checkpoint_hook(saved_tensors_hooks):  # noqa: N801
    def __init__(self, frame: _CheckpointFrame, args: Any, kwargs: Any) -> None:
        def pack_hook(x: Tensor) -> int:
            frame.count += 1
            return frame.count - 1

        def unpack_hook(index: int) -> Tensor:
            if not frame.recomputed:
                with transformer_engine._recomputation_hook(frame), torch.enable_grad():
                    frame.recompute_fn(*args, **kwargs)
            return frame.recomputed[index]

        super().__init__(pack_hook, unpack_hook)


class _CheckpointFunction(torch.autograd.Function):
    """Transformer Engine's reentrant checkpoint, without random states, autocast and FP8."""

    @staticmethod
    def forward(
        ctx: Any,
        run_function: Any,
        distribute_saved_activations: bool,
        get_rng_state_tracker: Any,
        tp_group: Any,
        context_fn: Any,
        kwargs: dict[str, Any],
        *args: Tensor,
    ) -> Tensor:
        ctx.run_function, ctx.kwargs = run_function, kwargs
        ctx.save_for_backward(*args)
        with torch.no_grad():
            return run_function(*args, **kwargs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            torch.autograd.backward(ctx.run_function(*inputs, **ctx.kwargs), grad)
        return (*[None] * 6, *(tensor.grad for tensor in inputs))


def _te_checkpoint(
    function: Any,
    *args: Any,
    use_reentrant: bool = True,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Any = None,
    tp_group: Any = None,
    context_fn: Any = None,
    **kwargs: Any,
) -> Any:
    if use_reentrant:
        options = distribute_saved_activations, get_rng_state_tracker, tp_group, context_fn, kwargs
        return transformer_engine._CheckpointFunction.apply(function, *options, *args)
    with transformer_engine._checkpoint_hook(_CheckpointFrame(function, get_rng_state_tracker), args, kwargs):
        return function(*args, **kwargs)


def _loaded_transformer_engine() -> Any:
    """Return its module of checkpoints, if the process has loaded it (see `support/soft_te.py`), or one of these names."""
    if TRANSFORMER_ENGINE not in sys.modules:
        module: Any = sys.modules.setdefault(TRANSFORMER_ENGINE, ModuleType(TRANSFORMER_ENGINE))
        for name in ("_CheckpointFrame", "_CheckpointFunction", "_checkpoint_hook", "_recomputation_hook"):
            setattr(module, name, globals()[name])
        module.checkpoint = _te_checkpoint
    return sys.modules[TRANSFORMER_ENGINE]


transformer_engine = _loaded_transformer_engine()


def by_hooks(layer: Callable[..., Tensor], *args: Any) -> Tensor:
    """Transformer Engine's non-reentrant checkpoint."""
    checkpointed: Tensor = transformer_engine.checkpoint(layer, *args, use_reentrant=False)
    return checkpointed


def transformer_engine_reentrant(layer: Callable[..., Tensor], *args: Any) -> Tensor:
    checkpointed: Tensor = transformer_engine.checkpoint(layer, *args)
    return checkpointed


def nested(outer: Around, inner: Around) -> Around:
    return lambda layer, hidden: outer(lambda h: inner(layer, h), hidden)


# Kind of checkpoint, and how often it runs a layer again.
KINDS: dict[str, tuple[Around, int]] = {
    "reentrant": (reentrant, 1),
    "non-reentrant": (non_reentrant, 1),
    "by hooks": (by_hooks, 1),
    "Transformer Engine's reentrant": (transformer_engine_reentrant, 1),
    "gradients on inside a reentrant one": (lambda layer, hidden: reentrant(with_gradients(layer), hidden), 1),
    "gradients on inside a non-reentrant one": (lambda layer, hidden: non_reentrant(with_gradients(layer), hidden), 1),
    "reentrant in non-reentrant": (nested(non_reentrant, reentrant), 2),
    "non-reentrant in reentrant": (nested(reentrant, non_reentrant), 2),
    # The inner saves all, so the outer never recomputes.
    "by hooks in non-reentrant": (nested(non_reentrant, by_hooks), 1),
    "reentrant in by hooks": (nested(by_hooks, reentrant), 2),
}


def recompute(function: Callable[..., Tensor], inputs: Tensor, grad: Tensor) -> Tensor | None:
    """Run a function again and backwards through it; return the gradient of its inputs."""
    inputs = inputs.detach().requires_grad_()
    with torch.enable_grad():
        output = function(inputs)
    torch.autograd.backward(output, grad)
    return inputs.grad


class _OfATrainer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Any, hidden: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(hidden)
        return function(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, recompute(ctx.function, *ctx.saved_tensors, grad)


def unknown(layer: Callable[..., Tensor], hidden: Tensor) -> Tensor:
    """A checkpoint of a trainer's own, without a tape."""
    return _OfATrainer.apply(layer, hidden)


Seen = dict[tuple[int, int], list[Tensor]]
"""(number of the forward, layer number) -> the routing maps that left the router, the forward's first."""


@contextmanager
def watched(chunk: Chunk) -> Iterator[Seen]:
    """Yield what leaves the chunk's routers."""
    seen: Seen = defaultdict(list)

    def hook(router: Any, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        numbers = args[0][..., -1].unique()
        assert numbers.numel() == 1
        seen[int(numbers), router.layer_number].append(output[1].clone())

    handles = [router.register_forward_hook(hook) for router in chunk.routers]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def disturb(chunk: Chunk, seed: int = 99) -> None:
    """Give the routers other weights, without autograd noticing: a live recompute cannot agree with its forward by luck."""
    generator = torch.Generator().manual_seed(seed)
    for router in chunk.routers:
        router.weight.data = torch.randn(router.weight.shape, generator=generator).to(router.weight.device)
        router.weight.data[:, -1] = 0


def flips(seen: Seen) -> int:
    """How many recomputed decisions are not their forward's."""
    return sum(int((later != first).any(dim=1).sum()) for first, *rest in seen.values() for later in rest)


def num_recomputed(seen: Seen) -> int:
    return sum(len(maps) - 1 for maps in seen.values())


def tokens(num_sequences: int = 2, length: int = 4, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (num_sequences, length), generator=torch.Generator().manual_seed(seed))


def random_routes(
    num_tokens: int, num_layers: int = 3, seed: int = 5, *, topk: int = TOPK, num_experts: int = EXPERTS
) -> Tensor:
    """Valid routes that no router chose: [num_tokens, num_layers, topk] distinct random ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num_tokens, num_layers, num_experts, generator=generator).argsort(dim=2)[:, :, :topk]


def random_trace(num_tokens: int = 16, num_layers: int = 3, *, seed: int = 5, **options: Any) -> mrr.RoutingTrace:
    return mrr.RoutingTrace(
        topk_indices=random_routes(num_tokens, num_layers, seed),
        layer_numbers=range(1, num_layers + 1),
        num_experts=EXPERTS,
        **options,
    )


def as_map(topk_indices: Tensor, num_experts: int = EXPERTS) -> Tensor:
    """[n, topk] -> [n, num_experts] bool."""
    return torch.zeros(len(topk_indices), num_experts, dtype=torch.bool).scatter(1, topk_indices.long(), True)


def wrong_replays(seen: Seen, trace: mrr.RoutingTrace, rows: Tensor | None = None) -> int:
    """How many decisions of rows with a route are not the trace's, in forwards and recomputes.

    Args:
        rows: [b, s] of every forward, s-major in a router; None: forward n has the n-th 8 rows as [2, 4].
    """
    wrong = 0
    for (number, layer), maps in seen.items():
        at = (ROWS + 8 * number if rows is None else rows).t().reshape(-1)
        routed = (at >= 0) & trace.replay_mask[at.clamp(min=0)]
        expected = as_map(trace.layer(layer)[at[routed]])
        wrong += sum(int((routing_map[routed] != expected).any(dim=1).sum()) for routing_map in maps)
    return wrong


def live_maps(chunk: Chunk) -> dict[int, list[Tensor]]:
    """{layer number: what the router would choose in each of its calls from now on, by the weights that it has by then}."""
    maps: dict[int, list[Tensor]] = {router.layer_number: [] for router in chunk.routers}

    def hook(router: Any, args: tuple[Tensor, ...]) -> None:
        logits = args[0].detach().flatten(0, 1) @ router.weight.detach().t()
        maps[router.layer_number].append(as_map(logits.topk(TOPK, dim=1).indices))

    for router in chunk.routers:
        router.register_forward_pre_hook(hook)
    return maps


def held(chunk: Chunk) -> int:
    """How many calls of its routers tapes hold, which live with the graphs that may ask for them."""
    gc.collect()
    return sum(type(each) is Entry and each.router in chunk.routers for each in gc.get_objects())


# Sessions, and the steps of a trainer in them

Start = Callable[[Any], Any]
STARTS: dict[str, Start] = {
    "freeze": mrr.freeze_recompute,
    "record": mrr.record,
    "replay": lambda chunk: mrr.replay(chunk, random_trace()),
}


def forward(chunk: Chunk, session: Any = None, number: int = 0) -> Tensor:
    """The loss of forward `number` of the same tokens; a session that wants micro-batches gets its 8 rows."""
    if session is not None and session._microbatches is not None:
        session.microbatch(ROWS + 8 * number)
    loss: Tensor = chunk(tokens(), number).square().sum()
    return loss


def disturbed_backward(chunk: Chunk, *losses: Tensor) -> None:
    """One backward over all losses, by when the routers have other weights."""
    disturb(chunk)
    torch.stack(losses).sum().backward()
