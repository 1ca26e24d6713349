"""A Megatron config as JSON -> what a session would replay and refuse, without building the model."""

from __future__ import annotations

import re
import warnings
from dataclasses import MISSING, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from megatron_router_replay.errors import StoreError
from megatron_router_replay.ids import MAX_EXPERTS, index_dtype

_PATTERN = re.compile(r"\[\s*([01](?:\s*,\s*[01])*)\s*,?\s*\]\s*(?:\*\s*(\d+))?")
_MAX_LAYERS = 10_000
_READ_BESIDE = {"moe_n_hash_layers", "hybrid_layer_pattern", "hybrid_override_pattern"}
"""Arguments that decide about routing and are no field of TransformerConfig."""
_ALIASES = {"num_experts": "num_moe_experts"}
"""Names of Megatron-LM's arguments -> fields of TransformerConfig."""


def read_megatron_config(values: dict[str, Any], file: Path) -> dict[str, Any]:
    """Return what `router-replay doctor` says of the fields of a TransformerConfig, or of a checkpoint's arguments.

    Raises:
        StoreError: fields that decide about routing are missing or of another kind.
    """
    given = {_ALIASES.get(name, name): value for name, value in _flat(values).items()}
    defaults = _config_defaults()
    config = SimpleNamespace(**{**defaults, **given})
    num_layers, num_experts, topk = _sizes(given, config.moe_router_topk, file)
    layers = _moe_layer_numbers(given, config.moe_layer_freq, num_layers, file)
    refused = _refusals_by_layer(
        config, layers, num_experts, topk, hash_layers=int(given.get("moe_n_hash_layers") or 0)
    )
    return {
        "kind": "megatron",
        "path": str(file),
        "model_type": "",
        "num_layers": num_layers,
        "moe_layers": layers,
        "replayed_layers": [number for number in layers if not refused[number]],
        "num_experts": num_experts,
        "topk": topk,
        "num_shared_experts": 1 if config.moe_shared_expert_intermediate_size else 0,
        "bytes_per_token": len(layers) * topk * index_dtype(num_experts).itemsize,
        "refused": _refusal_sentences(refused),
        "notes": _notes(config, unread=sorted(set(given) - set(defaults) - _READ_BESIDE)),
    }


def _config_defaults() -> dict[str, Any]:
    """Return every field of the installed TransformerConfig with its default, None where it has none.

    The class itself is not made: its own checks ask for sizes that say nothing about routing, and for a GPU.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of optional packages, on import
        from megatron.core.transformer.transformer_config import TransformerConfig

    return {
        field.name: field.default_factory() if field.default_factory is not MISSING else field.default
        for field in fields(TransformerConfig)
    }


def _sizes(given: dict[str, Any], topk: Any, file: Path) -> tuple[int, int, int]:
    """Return num_layers, num_experts and topk, checked."""
    num_layers, num_experts = (_count(given, name, file) for name in ("num_layers", "num_moe_experts"))
    if num_layers > _MAX_LAYERS:
        raise StoreError(
            f"the config {file} asks for num_layers={num_layers}, more than the {_MAX_LAYERS} that are read."
        )
    topk = _count({"moe_router_topk": topk}, "moe_router_topk", file)
    if not topk <= num_experts <= MAX_EXPERTS:
        raise StoreError(f"the config {file} asks for top-{topk} of {num_experts} experts.")
    return num_layers, num_experts, topk


def _moe_layer_numbers(given: dict[str, Any], frequency: Any, num_layers: int, file: Path) -> list[int]:
    pattern = given.get("hybrid_layer_pattern") or given.get("hybrid_override_pattern")
    # A hybrid model's pattern says of every layer what it is; its moe_layer_freq is a default that nobody looks at.
    hybrid = pattern is not None
    flags = _hybrid_moe_layers(pattern, num_layers, file) if hybrid else _moe_layers(frequency, num_layers, file)
    return [i + 1 for i, is_moe in enumerate(flags) if is_moe]


def _refusals_by_layer(
    config: Any, layers: list[int], num_experts: int, topk: int, *, hash_layers: int
) -> dict[int, tuple[str, ...]]:
    """Return why a session would refuse the router of each layer, () where it would not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer.moe.router import TopKRouter

        from megatron_router_replay.mcore.support import refusals

    # The checks of a session look at a router, so they get one, without the weights that its constructor would allocate.
    router: Any = TopKRouter.__new__(TopKRouter)
    nn.Module.__init__(router)
    router.config, router.num_experts, router.topk = config, num_experts, topk
    refused = {}
    for number in layers:
        router.is_hash_layer = number <= hash_layers
        refused[number] = tuple(refusals(router))
    return refused


def _refusal_sentences(refused: dict[int, tuple[str, ...]]) -> list[str]:
    """Return each reason once, with its layers unless it is true of all."""
    numbers_of: dict[str, list[int]] = {}
    for number, reasons in refused.items():
        for reason in reasons:
            numbers_of.setdefault(reason, []).append(number)
    return [
        reason if len(numbers) == len(refused) else f"layers {numbers}: {reason}"
        for reason, numbers in numbers_of.items()
    ]


def _notes(config: Any, unread: list[str]) -> list[str]:
    notes = []
    if config.mtp_num_layers:
        notes.append(f"{config.mtp_num_layers} multi-token-prediction layers stay live unless replay(..., mtp=True)")
    if unread:
        shown = ", ".join(unread[:6]) + (", ..." if len(unread) > 6 else "")
        notes.append(f"not read, being no field of this Megatron-Core's TransformerConfig: {shown}")
    notes.append("router classes of your own are seen by mrr.explain(model) only")
    return notes


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields, wherever a file nests them: at the top, or under args, model or config."""
    for name in ("args", "model", "config", "transformer_config"):
        if isinstance(values.get(name), dict) and "num_layers" in values[name]:
            return dict(values[name])
    return values


def _count(values: dict[str, Any], name: str, file: Path) -> int:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise StoreError(
            f"the config {file} has {name}={value!r}, expected a number from 1: is it the config of an MoE model? A "
            "Hugging Face config has model_type, Megatron's has num_layers and num_moe_experts."
        )
    return value


def _hybrid_moe_layers(pattern: Any, num_layers: int, file: Path) -> list[bool]:
    """Return which layers of a hybrid model have routed experts: one letter a layer, E for experts.

    Behind a slash stand multi-token-prediction layers, which count apart; | parts pipeline stages.
    """
    main = pattern.split("/")[0].replace("|", "") if isinstance(pattern, str) else ""
    if len(main) != num_layers:
        raise StoreError(
            f"the config {file} has hybrid_layer_pattern={str(pattern)[:80]!r}, which names {len(main)} layers, and "
            f"num_layers={num_layers}."
        )
    return [letter == "E" for letter in main]


def _moe_layers(frequency: Any, num_layers: int, file: Path) -> list[bool]:
    """Return which layers have routed experts; frequency is N, a list of 0 and 1, or text such as "[0]*3+[1]*58"."""
    if isinstance(frequency, str):
        terms = [_PATTERN.fullmatch(term.strip()) for term in frequency.strip("() ").split("+")]
        if frequency.strip().isdecimal():
            frequency = int(frequency)
        elif all(terms):
            frequency = [
                int(flag)
                for term in terms
                if term is not None
                # One layer too many is enough to be refused: a factor of a billion would fill the memory first.
                for _ in range(min(int(term[2] or 1), num_layers + 1))
                for flag in term[1].split(",")
            ]
    if isinstance(frequency, int) and not isinstance(frequency, bool) and frequency >= 1:
        return [i % frequency == 0 for i in range(num_layers)]
    if isinstance(frequency, list) and len(frequency) == num_layers and all(flag in (0, 1) for flag in frequency):
        return [bool(flag) for flag in frequency]
    raise StoreError(f"the config {file} has moe_layer_freq={frequency!r}, which does not fit num_layers={num_layers}.")
