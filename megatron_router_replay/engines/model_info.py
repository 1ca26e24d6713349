"""What a Hugging Face config.json says of a model's routing: which layers route, over how many experts, how many each.

Layer numbers are Megatron's, from 1: hidden layer i of the Hugging Face model is layer_number i + 1. Multi-token-prediction
layers are not hidden layers and are left out. A model type that is not listed here raises: nothing is guessed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from megatron_router_replay.errors import PayloadError

Config = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRoutingInfo:
    """The part of a model that its routes depend on.

    Args:
        num_layers: hidden layers, dense ones included.
        moe_layer_numbers: Megatron's layer_number (from 1) of each layer with routed experts, increasing.
        num_experts: routed experts in each of these layers.
        topk: routed experts per token.
        num_shared_experts: experts that every token takes; they are never part of a route.
        model_type: Hugging Face's name of the architecture; "" where unknown.

    Raises:
        PayloadError: a number is out of range or a layer lies outside the model.
    """

    num_layers: int
    moe_layer_numbers: tuple[int, ...]
    num_experts: int
    topk: int
    num_shared_experts: int = 0
    model_type: str = ""

    def __post_init__(self) -> None:
        numbers = tuple(self.moe_layer_numbers)
        for name in ("num_layers", "num_experts", "topk", "num_shared_experts"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise PayloadError(f"{name} of the model must be an integer, got {value!r}.")
        if not 1 <= self.num_layers <= 65536 or not 1 <= self.num_experts <= 32768 or self.num_shared_experts < 0:
            raise PayloadError(
                f"cannot describe a model of num_layers={self.num_layers}, num_experts={self.num_experts}, "
                f"num_shared_experts={self.num_shared_experts}: expected 1..65536, 1..32768 and 0 or more."
            )
        if not 1 <= self.topk <= self.num_experts:
            raise PayloadError(f"topk={self.topk} of the model must lie in 1..num_experts={self.num_experts}.")
        if list(numbers) != sorted(set(numbers)) or (numbers and not 1 <= numbers[0] <= numbers[-1] <= self.num_layers):
            raise PayloadError(
                f"moe_layer_numbers must increase within 1..num_layers={self.num_layers}, got {list(numbers)}."
            )
        if not numbers:
            raise PayloadError("the model has no layer with routed experts: it is dense and has no routes to replay.")
        object.__setattr__(self, "moe_layer_numbers", numbers)

    @classmethod
    def from_hf_config(cls, config: Config | str | os.PathLike[str]) -> ModelRoutingInfo:
        """Read a config.json: the parsed dict, the path of the file or of the folder that holds it.

        The configs of multimodal models are read through their `text_config`. A `transformers` config object works
        too (through its `to_dict`).

        Raises:
            PayloadError: the file cannot be read, the model type is not known here, a field is missing or two fields
                contradict each other; the message names them.
        """
        values = _load(config)
        model_type = values.get("model_type")
        # A multimodal model's own type says nothing of its language model's layers.
        if model_type not in _FAMILIES and isinstance(values.get("text_config"), Mapping):
            values = values["text_config"]
            model_type = values.get("model_type")
        if not isinstance(model_type, str):
            raise PayloadError(
                "the model config has no model_type (nor text_config.model_type): cannot tell its layers."
            )
        if model_type not in _FAMILIES:
            raise PayloadError(
                f"model_type {model_type!r} is not known here, so its MoE layers would be a guess. "
                f"Known: {', '.join(sorted(_FAMILIES))}. Make a ModelRoutingInfo(...) by hand for others."
            )
        family = _FAMILIES[model_type]
        is_moe, shared = family.moe_layers(values), family.shared_experts
        if shared is None:
            # null is written by models of these classes without shared experts.
            shared = 0 if values.get("n_shared_experts", 0) is None else _integer(values, "n_shared_experts")
        return cls(
            num_layers=len(is_moe),
            moe_layer_numbers=tuple(i + 1 for i, moe in enumerate(is_moe) if moe),
            num_experts=_agreed(values, *family.num_experts),
            topk=_agreed(values, "num_experts_per_tok", optional=("experts_per_token",)),
            num_shared_experts=shared,
            model_type=model_type,
        )

    @classmethod
    def of_model(cls, model_chunks: Any) -> ModelRoutingInfo:
        """Read a Megatron-Core model, where there is no Hugging Face config; the same on every rank.

        Args:
            model_chunks: the model or its chunks on this rank, wrapped or not; of any pipeline stage.

        Raises:
            LayoutError: it is no Megatron-Core model with experts, or it does not follow its config.
        """
        # Needs Megatron-Core, and lies behind this module in the direction of the data: loaded for those who ask.
        from megatron_router_replay.mcore.layers import routing_info

        return routing_info(model_chunks)


ModelLike = Union[ModelRoutingInfo, Config, str, "os.PathLike[str]"]
"""What decoders take as `model`."""


def as_model_info(model: ModelLike) -> ModelRoutingInfo:
    """Return `model` if it is a ModelRoutingInfo, else read it as a Hugging Face config."""
    return model if isinstance(model, ModelRoutingInfo) else ModelRoutingInfo.from_hf_config(model)


def _load(config: Any) -> Config:
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise PayloadError(f"a model config is a dict, a path or a ModelRoutingInfo, got {type(config).__name__}.")
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PayloadError(f"cannot read the model config {path}: {error}.") from error
    if not isinstance(values, dict):
        raise PayloadError(f"the model config {path} holds {type(values).__name__}, expected an object.")
    return values


def _integer(config: Config, name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int):
        raise PayloadError(
            f"the {config.get('model_type')} config has {name}={value!r}, expected an integer. "
            "Give the model's complete config.json."
        )
    return value


def _agreed(config: Config, *names: str, optional: tuple[str, ...] = ()) -> int:
    """Return the integer that is stored under one or more of `names`; one at least must be there, all must agree."""
    found = {name: _integer(config, name) for name in (*names, *optional) if config.get(name) is not None}
    if not found:
        raise PayloadError(f"the {config.get('model_type')} config lacks {' / '.join(names)}.")
    if len(set(found.values())) > 1:
        raise PayloadError(f"the {config.get('model_type')} config contradicts itself: {found}.")
    return next(iter(found.values()))


def _num_layers(config: Config) -> int:
    num_layers = _integer(config, "num_hidden_layers")
    # Lists of this length are made before ModelRoutingInfo checks it.
    if not 1 <= num_layers <= 65536:
        raise PayloadError(f"num_hidden_layers={num_layers} of the config must lie in 1..65536.")
    return num_layers


def _list(config: Config, name: str) -> list[Any]:
    value = config.get(name)
    if not isinstance(value, (list, tuple)):
        raise PayloadError(f"the {config.get('model_type')} config has {name}={value!r}, expected a list.")
    return list(value)


def _layer_indices(config: Config, name: str, num_layers: int) -> list[int]:
    indices = _list(config, name)
    if not all(type(i) is int and 0 <= i < num_layers for i in indices):
        raise PayloadError(f"{name}={indices} of the config do not fit {num_layers} layers.")
    return indices


def _every_layer(config: Config) -> list[bool]:
    """Source: transformers 5.23, MixtralDecoderLayer, GptOssDecoderLayer, Qwen3_5MoeDecoderLayer: no dense layers."""
    if config.get("mlp_only_layers"):
        raise PayloadError(
            f"a {config['model_type']} has routed experts in every layer, its config says mlp_only_layers="
            f"{config['mlp_only_layers']}: the two contradict each other."
        )
    return [True] * _num_layers(config)


def _sparse_step(config: Config) -> list[bool]:
    """Source: transformers 5.23, Qwen3MoeDecoderLayer.__init__."""
    step, num_layers = _integer(config, "decoder_sparse_step"), _num_layers(config)
    dense = _layer_indices(config, "mlp_only_layers", num_layers)
    if step < 1:
        raise PayloadError(f"decoder_sparse_step={step} must be 1 or more.")
    return [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]


def _first_dense(config: Config) -> list[bool]:
    """Source: vLLM 0.22, DeepseekV2DecoderLayer.__init__; transformers 5.23, `mlp_layer_types` of newer configs."""
    num_layers = _num_layers(config)
    answers: dict[str, list[bool]] = {}
    if config.get("mlp_layer_types") is not None:
        types = _list(config, "mlp_layer_types")
        if len(types) != num_layers or not all(kind in ("dense", "sparse") for kind in types):
            raise PayloadError(f"mlp_layer_types must name {num_layers} layers 'dense' or 'sparse', got {types}.")
        answers["mlp_layer_types"] = [kind == "sparse" for kind in types]
    if config.get("first_k_dense_replace") is not None or not answers:
        first, freq = _integer(config, "first_k_dense_replace"), config.get("moe_layer_freq")
        if not isinstance(freq, (list, tuple)):
            # Absent means 1: the field is optional in every reader of these configs, and transformers 5 does not write it.
            step = _integer(config, "moe_layer_freq", 1)
            freq = [i % step == 0 for i in range(num_layers)] if step >= 1 else []
        if len(freq) != num_layers or not all(routed in (0, 1) for routed in freq):
            raise PayloadError(
                f"moe_layer_freq={config.get('moe_layer_freq')!r} must be 1 or more, or one 0 or 1 for each of "
                f"{num_layers} layers."
            )
        answers["first_k_dense_replace"] = [i >= first and bool(routed) for i, routed in enumerate(freq)]
    first_answer = next(iter(answers.values()))
    if any(answer != first_answer for answer in answers.values()):
        raise PayloadError(f"mlp_layer_types and first_k_dense_replace of the {config['model_type']} config disagree.")
    return first_answer


_HYBRID = {"M": False, "*": False, "-": False, "E": True}
_HYBRID_NAMES = {"mamba", "linear_attention", "attention", "full_attention", "mlp", "moe"}


def _hybrid(config: Config) -> list[bool]:
    """Source: NVIDIA's configuration_nemotron_h.py (M mamba, * attention, - MLP, E experts); transformers 5.23."""
    answers: list[list[bool]] = []
    pattern = config.get("hybrid_override_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or not set(pattern) <= set(_HYBRID):
            raise PayloadError(f"hybrid_override_pattern {pattern!r} may hold only {' '.join(_HYBRID)}.")
        answers.append([_HYBRID[kind] for kind in pattern])
    if config.get("layers_block_type") is not None or pattern is None:
        kinds = _list(config, "layers_block_type")
        if not all(kind in _HYBRID_NAMES for kind in kinds):
            raise PayloadError(f"layers_block_type {kinds} may hold only {sorted(_HYBRID_NAMES)}.")
        answers.append([kind == "moe" for kind in kinds])
    if config.get("num_hidden_layers") is not None and _num_layers(config) != len(answers[0]):
        raise PayloadError(
            f"the layer pattern names {len(answers[0])} layers, num_hidden_layers={config['num_hidden_layers']}."
        )
    if answers[0] != answers[-1]:
        raise PayloadError("hybrid_override_pattern and layers_block_type of the config disagree.")
    return answers[0]


def _interleaved(config: Config) -> list[bool]:
    """Source: transformers 5.23, Llama4TextConfig.__post_init__."""
    num_layers = _num_layers(config)
    if config.get("moe_layers") is not None:
        moe = _layer_indices(config, "moe_layers", num_layers)
        return [i in moe for i in range(num_layers)]
    step = _integer(config, "interleave_moe_layer_step")
    if step < 1:
        raise PayloadError(f"interleave_moe_layer_step={step} must be 1 or more.")
    return [(i + 1) % step == 0 for i in range(num_layers)]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """How to read the configs of one kind of architecture; `shared_experts` None: its config counts them."""

    moe_layers: Callable[[Config], list[bool]]
    num_experts: tuple[str, ...]
    shared_experts: int | None


_LOCAL = ("num_experts", "num_local_experts")
_QWEN = _Family(moe_layers=_sparse_step, num_experts=_LOCAL, shared_experts=0)
_QWEN_SHARED = _Family(moe_layers=_sparse_step, num_experts=_LOCAL, shared_experts=1)
_ALL_MOE = _Family(moe_layers=_every_layer, num_experts=_LOCAL, shared_experts=0)
_ALL_MOE_SHARED = _Family(moe_layers=_every_layer, num_experts=_LOCAL, shared_experts=1)
_DEEPSEEK = _Family(moe_layers=_first_dense, num_experts=("n_routed_experts",), shared_experts=None)
_NEMOTRON = _Family(moe_layers=_hybrid, num_experts=("n_routed_experts",), shared_experts=None)
_LLAMA4 = _Family(moe_layers=_interleaved, num_experts=("num_local_experts",), shared_experts=1)

_FAMILIES = {
    "qwen3_moe": _QWEN,
    "qwen3_vl_moe_text": _QWEN,
    "qwen2_moe": _QWEN_SHARED,
    "qwen3_next": _QWEN_SHARED,
    "qwen3_5_moe_text": _ALL_MOE_SHARED,
    "mixtral": _ALL_MOE,
    "gpt_oss": _ALL_MOE,
    "olmoe": _ALL_MOE,
    "minimax_m2": _ALL_MOE,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "glm4v_moe_text": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "nemotron_h": _NEMOTRON,
    "llama4_text": _LLAMA4,
}
