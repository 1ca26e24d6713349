"""Hybrid models name their layers in a pattern, `M*E|ME/*E`: a symbol a layer, stages between |, MTP blocks behind /."""

from __future__ import annotations

from torch import nn


def main_pattern(model: nn.Module) -> str | None:
    """Return a symbol for each layer of a hybrid model's decoder, over all pipeline stages; None: it is no hybrid model.

    Source: Megatron-Core 0.18.2, hybrid_layer_allocation.parse_hybrid_pattern.
    """
    pattern = _pattern(model)
    return None if pattern is None else pattern.split("/")[0].replace("|", "")


def mtp_pattern(model: nn.Module) -> str | None:
    """Return a symbol for each inner layer of one multi-token-prediction layer; None: it is one transformer layer."""
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
