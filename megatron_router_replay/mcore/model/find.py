"""Find the routers of a model chunk and their layer numbers, which are read from the modules, never counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from megatron_router_replay.errors import LayoutError, listed
from megatron_router_replay.mcore.model.upstream import dispatchers_of

Models = nn.Module | Sequence[nn.Module]
"""A model, or the list of its chunks on this rank; wrapped (DistributedDataParallel, Float16Module) or not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundRouter:
    """A router of a model chunk.

    Args:
        name: its module path in the chunk.
        router: the module that chooses experts; a TopKRouter once `check_supported` has passed.
        layer_number: Megatron's global layer_number, from 1; a multi-token-prediction layer counts on after the
            decoder's last (num_layers + 1, ...), and so does each layer inside it where a hybrid pattern gives it several.
            Megatron-Core 0.16.1 numbers its router so too; later versions start at 1 again, which would alias a decoder
            layer, so the number is made of the MTP layer's and the position in it.
        is_mtp: it belongs to a multi-token-prediction layer.
        dispatchers: the token dispatchers of its layer; none in a custom layer that mixes the experts itself.
        is_graphed: Megatron-Core captures the whole layer of this router into a CUDA graph.
    """

    name: str
    router: Any
    layer_number: int
    is_mtp: bool
    dispatchers: tuple[Any, ...] = ()
    is_graphed: bool = False

    def __str__(self) -> str:
        return f"{'MTP layer' if self.is_mtp else 'layer'} {self.layer_number} ({self.name})"


def as_chunks(model_chunks: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the chunks as a list: one, or one a virtual pipeline stage.

    Raises:
        LayoutError: none are given, or one twice.
    """
    chunks = list(model_chunks) if isinstance(model_chunks, Sequence) else [model_chunks]
    if not chunks or not all(isinstance(chunk, nn.Module) for chunk in chunks):
        kinds = listed(sorted({type(chunk).__name__ for chunk in chunks})) or "an empty list"
        if any(isinstance(chunk, list) for chunk in chunks):
            kinds = "a list of lists: pass the inner one"
        raise LayoutError(
            f"MRR403: model_chunks must be a model or a list of its chunks on this rank, got {kinds}. The model is the first "
            "argument."
        )
    inner = [id(unwrap(chunk)) for chunk in chunks]
    if len(set(inner)) != len(inner):
        raise LayoutError(f"MRR403: {len(inner)} model_chunks were given, but some of them are the same model.")
    return chunks


def check_has_experts(walks: Sequence[WalkedChunk]) -> None:
    """Raise for a chunk that cannot have routers; a pipeline stage of an MoE model may rightly have none.

    Raises:
        LayoutError: a chunk has no router, and its config has no experts (or it has no config).
    """
    for walked in walks:
        config = getattr(walked.model, "config", None)
        if not walked.routers and not getattr(config, "num_moe_experts", None):
            missing = "it has no config" if config is None else "its config has num_moe_experts=None"
            raise LayoutError(
                f"MRR403: {type(walked.model).__name__} is no Megatron-Core model with experts: it has no router, "
                f"and {missing}. Pass the model, or the list of its chunks on this rank."
            )


def unwrap(module: nn.Module) -> nn.Module:
    """Return the innermost model of wrappers such as DistributedDataParallel, Float16Module and torch.compile's."""
    return wrappers(module)[-1]


def wrappers(module: nn.Module) -> list[nn.Module]:
    """Return the module and everything it wraps, outermost first.

    A wrapper has its model as `module`, or it has no config and a single child with routers (an actor-critic).
    """
    chain = [module]
    while True:
        # torch.compile's wrapper forwards attributes to its model, so `_orig_mod` comes first.
        inner = getattr(chain[-1], "_orig_mod", getattr(chain[-1], "module", None))
        if not isinstance(inner, nn.Module) and not hasattr(chain[-1], "config"):
            routing = [child for child in chain[-1].children() if any(isinstance(m, Router) for m in child.modules())]
            inner = routing[0] if len(routing) == 1 and hasattr(routing[0], "forward") else None
            # Down to something that has a config, or not at all: the layers of a model are no models.
            if inner is not None and not any(hasattr(level, "config") for level in wrappers(inner)):
                inner = None
        if not isinstance(inner, nn.Module):
            inner = _language_model(chain[-1])
        if inner is None:
            return chain
        chain.append(inner)


def _language_model(model: nn.Module) -> nn.Module | None:
    """Return the language model in a multimodal one, which calls it with embeddings; None: there is none, or several.

    It has all routers, so what runs around it (vision, the merge of embeddings, packing) routes nothing.
    """
    names = language_models(model)
    if isinstance(model, LanguageModule) or len(names) != 1:
        return None
    inner = model.get_submodule(names[0])
    num_routers = sum(isinstance(each, Router) for each in model.modules())
    return inner if num_routers == sum(isinstance(each, Router) for each in inner.modules()) else None


def language_models(model: nn.Module) -> list[str]:
    """Return the paths of the language models in a model that have routers, the outermost ones."""
    found: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if (
            isinstance(module, LanguageModule)
            and not is_inside
            and any(isinstance(m, Router) for m in module.modules())
        ):
            found.append(name)
    return found


def _check_one_language_model(model: nn.Module) -> None:
    """Raise with the parts of a model that have a language model each, as a thinker and a talker; each has its tokens."""
    paths = [name.split(".") for name in language_models(model)]
    if len(paths) > 1:
        shared = next(n for n in range(len(paths[0])) if len({tuple(path[: n + 1]) for path in paths}) > 1)
        parts = [".".join(path[: shared + 1]) for path in paths]
        raise LayoutError(
            f"MRR403: {type(model).__name__} has {len(parts)} language models with routers, in {listed(parts)}, and each has "
            f"tokens of its own. Open the session on the one that trains on these routes, as on model.{parts[0]}."
        )


def check_whole_pipeline(walks: Sequence[WalkedChunk]) -> None:
    """Raise unless all virtual pipeline stages of this rank are there.

    Raises:
        LayoutError: some chunks of a virtual pipeline are missing; their routers would run live, in silence.
    """
    for walked in walks:
        size = getattr(getattr(walked.model, "config", None), "virtual_pipeline_model_parallel_size", None) or 1
        if len(walks) < size:
            raise LayoutError(
                f"MRR403: {len(walks)} model chunks were given, but this rank has {size} "
                "(virtual_pipeline_model_parallel_size): pass the whole list of chunks, as get_model returns it, not "
                "model[0]."
            )


class WalkedModule(NamedTuple):
    """A module of a chunk.

    Args:
        path: in the chunk.
        mtp_layer: the multi-token-prediction layer that it is or is in; None: in none.
        is_graphed: a layer that it is or is in is captured into a CUDA graph as a whole.
    """

    path: str
    module: nn.Module
    mtp_layer: Any = None
    is_graphed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WalkedChunk:
    """A model chunk with all of its modules.

    A model has thousands, so a session walks once where it opens and once where it closes.

    Args:
        levels: the chunk as it was given, and the models that it wraps, outermost first.
        model: the innermost of them.
        modules: every module of the model once, in the order of named_modules().
        routers: ordered by layer number.
    """

    levels: Sequence[nn.Module]
    model: nn.Module
    modules: Sequence[WalkedModule]
    routers: Sequence[FoundRouter]


def walk(chunk: nn.Module) -> WalkedChunk:
    """Return a chunk with its modules and routers.

    Raises:
        LayoutError: two routers have the same layer number, as those of two language models, or a router has none.
    """
    levels = wrappers(chunk)
    modules = _modules_of(levels[-1])
    return WalkedChunk(levels=levels, model=levels[-1], modules=modules, routers=_routers_of(levels[-1], modules))


def find_routers(chunk: nn.Module) -> Sequence[FoundRouter]:
    """Return the chunk's routers, see `WalkedChunk`."""
    return walk(chunk).routers


def _modules_of(model: nn.Module) -> list[WalkedModule]:
    """Return every module of a model.

    Source: Megatron-Core 0.16.1 to 0.19.2, TransformerLayer.create_mcore_cudagraph_manager: with cuda_graph_impl="local" and
    "attn" among the captured parts, a layer that has attention and experts, as all of a GPT model, is captured as a whole.
    """
    placed: dict[int, WalkedModule] = {}
    ahead: list[WalkedModule] = [WalkedModule("", model)]
    while ahead:
        path, module, mtp_layer, is_graphed = ahead.pop()
        if id(module) in placed:
            continue
        if isinstance(module, MultiTokenPredictionLayer):
            mtp_layer = module
        # A TransformerBlock has a manager too, which it uses in inference alone.
        is_graphed = is_graphed or (isinstance(module, TransformerLayer) and hasattr(module, "cudagraph_manager"))
        placed[id(module)] = WalkedModule(path, module, mtp_layer, is_graphed)
        inner = [
            WalkedModule(f"{path}.{name}" if path else name, child, mtp_layer, is_graphed)
            for name, child in module.named_children()
        ]
        ahead += reversed(inner)
    return list(placed.values())


def _routers_of(model: nn.Module, modules: Sequence[WalkedModule]) -> list[FoundRouter]:
    routers: dict[int, Any] = {}
    dispatchers: dict[int, list[Any]] = {}
    places: dict[int, WalkedModule] = {}
    for place in modules:
        module: Any = place.module
        places[id(module)] = place
        if isinstance(module, BaseMoELayer):
            # A router that an MoE layer uses without being a Router is found too: it must be refused, not overlooked. One
            # that wraps a Router (PEFT's) calls it, and the hook is inside.
            if isinstance(module.router, Router) or len(_routers_in(module.router)) != 1:
                routers[id(module.router)] = module.router
        elif isinstance(module, Router):
            routers[id(module)] = module
        if "router" in module._modules:
            for router in _routers_in(module.router):
                dispatchers.setdefault(id(router), []).extend(dispatchers_of(module))
    found = []
    for key, router in routers.items():
        place = places.get(key, WalkedModule("?", router))
        number = getattr(router, "layer_number", None)
        if place.mtp_layer is not None:
            number = num_decoder_layers(model) + _number_in_mtp_block(place.mtp_layer, router)
        if number is None:
            raise LayoutError(f"MRR401: router {place.path!r} ({type(router).__name__}) has no layer_number.")
        found.append(
            FoundRouter(
                name=place.path,
                router=router,
                layer_number=number,
                is_mtp=place.mtp_layer is not None,
                dispatchers=tuple(dispatchers.get(key, ())),
                is_graphed=place.is_graphed,
            )
        )
    found.sort(key=lambda router: router.layer_number)
    for one, other in pairwise(found):
        if one.layer_number == other.layer_number:
            _check_one_language_model(model)
            raise LayoutError(f"MRR401: {one} and {other} have the same layer_number; a layer has one router.")
    return found


def _routers_in(module: nn.Module) -> list[nn.Module]:
    return [module] if isinstance(module, Router) else [each for each in module.modules() if isinstance(each, Router)]


def _number_in_mtp_block(mtp_layer: Any, router: Any) -> int:
    """Return the number of a router's layer among all inner layers of all multi-token-prediction layers, from 1.

    Source: Megatron-Core 0.18.2, MultiTokenPredictionLayer: `mtp_model_layer` is one transformer layer, or a HybridStack of
    the layers that the pattern names, the same in each MTP layer; up to 0.16 it is called `transformer_layer`.
    """
    inner = getattr(mtp_layer, "mtp_model_layer", None) or mtp_layer.transformer_layer
    layers = list(getattr(inner, "layers", [inner]))
    position = next(i for i, layer in enumerate(layers) if any(module is router for module in layer.modules()))
    return int((mtp_layer.layer_number - 1) * len(layers) + position + 1)


# ---- hybrid models name their layers in a pattern, `M*E|ME/*E`: a symbol a layer, stages between |, MTP blocks after /
def main_pattern(model: nn.Module) -> str | None:
    """Return a symbol for each layer of a hybrid model's decoder, over all pipeline stages; None: it is no hybrid model.

    Source: Megatron-Core 0.18.2, hybrid_layer_allocation.parse_hybrid_pattern.
    """
    pattern = _pattern(model)
    return None if pattern is None else pattern.split("/")[0].replace("|", "")


def mtp_pattern(model: nn.Module) -> str | None:
    """Return a symbol for each inner layer of a multi-token-prediction layer; None: it is a transformer layer."""
    pattern = _pattern(model)
    parts = [] if pattern is None else pattern.split("/")[1:]
    return parts[0] if parts else None


def num_decoder_layers(model: nn.Module) -> int:
    """Return how many layers the decoder of the whole model has; 0 if the model does not say."""
    pattern = main_pattern(model)
    if pattern is not None:
        return len(pattern)
    return int(getattr(getattr(model, "config", None), "num_layers", None) or 0)


def _pattern(model: nn.Module) -> str | None:
    # HybridModel since 0.18 and MambaModel of 0.17; MambaModel of 0.16.
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        pattern = getattr(model, name, None)
        if isinstance(pattern, str):
            return pattern
    return None
