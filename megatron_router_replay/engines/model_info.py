"""A Hugging Face config.json -> the routing of its model: the layers that route, their experts, and topk.

Layer numbers are Megatron's, from 1: hidden layer i of the Hugging Face model is layer_number i + 1. Multi-token-prediction
layers are not hidden layers and are left out. A model type that is not listed here raises: nothing is guessed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

from megatron_router_replay.checks import as_integer
from megatron_router_replay.engines.families import FAMILIES, NUM_EXPERTS, TOPK, Config, agreed, integer, moe_layers
from megatron_router_replay.errors import PayloadError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRoutingInfo:
    """The part of a model that its routes depend on.

    Args:
        num_layers: hidden layers, dense ones included.
        moe_layer_numbers: Megatron's layer_number (from 1) of each layer with routed experts, increasing.
        num_experts: routed experts in each of these layers.
        topk: routed experts per token.
        model_type: Hugging Face's name of the architecture; "" where unknown.

    Raises:
        PayloadError: a number is out of range or a layer lies outside the model.
    """

    num_layers: int
    moe_layer_numbers: tuple[int, ...]
    num_experts: int
    topk: int
    model_type: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.moe_layer_numbers, Iterable):
            raise PayloadError(f"MRR101: moe_layer_numbers={self.moe_layer_numbers!r} must be a list.")
        numbers = tuple(as_integer("a layer number", each, error=PayloadError) for each in self.moe_layer_numbers)
        for name in ("num_layers", "num_experts", "topk"):
            as_integer(f"{name} of the model", getattr(self, name), error=PayloadError)
        if not 1 <= self.num_layers <= 65536 or not 1 <= self.topk <= self.num_experts <= 32768:
            raise PayloadError(
                f"MRR303: cannot describe a model of num_layers={self.num_layers}, topk={self.topk} of num_experts="
                f"{self.num_experts}: expected 1..65536 layers, and topk of at most 32768 experts."
            )
        if not numbers:
            raise PayloadError(
                "MRR303: the model has no layer with routed experts: it is dense and has no routes to replay."
            )
        if list(numbers) != sorted(set(numbers)) or not 1 <= numbers[0] <= numbers[-1] <= self.num_layers:
            raise PayloadError(
                f"MRR303: moe_layer_numbers must increase within 1..num_layers={self.num_layers}, got {list(numbers)}."
            )
        object.__setattr__(self, "moe_layer_numbers", numbers)

    @classmethod
    def from_hf_config(cls, config: Config | str | os.PathLike[str]) -> ModelRoutingInfo:
        """Read a config.json from its parsed dict, its path or the path of its folder.

        The configs of multimodal models are read through their `text_config`. A `transformers` config object works
        too (through its `to_dict`).

        Raises:
            PayloadError: the file cannot be read, the model type is not known here, a field is missing or two fields
                contradict each other; the message names them.
        """
        values = _load(config)
        # A multimodal model's own type does not describe its language model's layers; an omni model nests twice.
        is_kimi_k3 = values.get("model_type") == "kimi_k3"
        for name in ("thinker_config", "text_config"):
            if values.get("model_type") not in FAMILIES and isinstance(values.get(name), Mapping):
                values = values[name]
        model_type = values.get("model_type")
        if not isinstance(model_type, str):
            raise PayloadError(
                "MRR303: the model config has no model_type (nor text_config.model_type): its layers are unknown."
            )
        if model_type not in FAMILIES:
            raise PayloadError(
                f"MRR303: model_type {model_type!r} is not known here, so its MoE layers would be a guess. Pass, in place of "
                f"the config, {_by_hand(values)} of megatron_router_replay.engines, with the layers from 1 that have routed "
                "experts; mcore.routing_info(model) reads it from a Megatron-Core model. "
                f"Known types: {', '.join(sorted(FAMILIES))}."
            )
        # Hidden layer i is layer_number i + 1; layers of multi-token prediction are no hidden layers.
        is_moe = moe_layers(values)
        return cls(
            num_layers=len(is_moe),
            moe_layer_numbers=tuple(i + 1 for i, moe in enumerate(is_moe) if moe),
            # Zero experts, of LongCat, are chosen like others, and their ids follow.
            num_experts=agreed(values, NUM_EXPERTS) + integer(values, "zero_expert_num", 0),
            topk=agreed(values, TOPK),
            # SGLang counts the tokens of this one otherwise than those of the Kimi Linear that it is inside.
            model_type="kimi_k3" if is_kimi_k3 else model_type,
        )


ModelLike = Union[ModelRoutingInfo, Config, str, "os.PathLike[str]"]
"""What decoders take as `model`."""


def as_model_info(model: ModelLike) -> ModelRoutingInfo:
    """Return `model` if it is a ModelRoutingInfo, else read it as a Hugging Face config."""
    return model if isinstance(model, ModelRoutingInfo) else ModelRoutingInfo.from_hf_config(model)


def _by_hand(config: Config) -> str:
    """Return the call that describes a model of an unknown type, with the numbers that its config states."""

    def stated(names: tuple[str, ...]) -> Any:
        values = {config[name] for name in names if type(config.get(name)) is int}
        return values.pop() if len(values) == 1 else "..."

    return (
        f"ModelRoutingInfo(num_layers={stated(('num_hidden_layers',))}, moe_layer_numbers=[...], "
        f"num_experts={stated(NUM_EXPERTS)}, topk={stated(TOPK)})"
    )


def _load(config: Any) -> Config:
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, os.PathLike)):
        first = config[0] if isinstance(config, (list, tuple)) and config else config
        advice = " A Megatron-Core model is read by mcore.routing_info(model)." if hasattr(first, "parameters") else ""
        raise PayloadError(
            f"MRR303: a model config is a dict, a path or a ModelRoutingInfo, got {type(config).__name__}.{advice}"
        )
    path = Path(config)
    if not path.exists():
        raise PayloadError(
            f"MRR303: cannot read the model config {path}: there is no such file or folder here. The id of a model on "
            "a hub is not looked up: give the folder that holds its config.json."
        )
    if path.is_dir():
        if not (path / "config.json").exists():
            raise PayloadError(
                f"MRR303: cannot read a model config in {path}: the folder has no config.json. Give the Hugging Face folder "
                "that the engine serves; a checkpoint of Megatron-Core has none."
            )
        path = path / "config.json"
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise PayloadError(f"MRR303: cannot read the model config {path}: {error}.") from error
    except ValueError as error:
        raise PayloadError(
            f"MRR303: cannot read the model config {path}: it is no JSON. Give the config.json of the served model, or "
            "its folder."
        ) from error
    if not isinstance(values, dict):
        raise PayloadError(f"MRR303: the model config {path} holds {type(values).__name__}, expected an object.")
    return values
