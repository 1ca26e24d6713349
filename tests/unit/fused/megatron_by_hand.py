"""Megatron-Core's unfused routing behind its top-k, written down from 0.16.1 and 0.18.2; nothing is the package's."""

from functools import partial

import torch


def routing_0_16(logits, topk_indices, *, score_function="softmax", use_pre_softmax=False, scaling_factor=None):
    indices = topk_indices.long()
    if score_function == "softmax" and use_pre_softmax:
        probs = torch.softmax(logits, dim=-1, dtype=torch.float32).type_as(logits).gather(1, indices)
    elif score_function == "softmax":
        probs = torch.softmax(logits.gather(1, indices), dim=-1, dtype=torch.float32).type_as(logits)
    else:
        assert score_function == "sigmoid"
        scores = torch.sigmoid(logits.float()).type_as(logits).gather(1, indices)
        probs = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20) if indices.shape[1] > 1 else scores
    if scaling_factor:
        probs = probs * scaling_factor
    return spread(logits, indices, probs)


def routing_0_18(logits, topk_indices, *, score_function="softmax", use_pre_softmax=False, scaling_factor=None):
    indices = topk_indices.long()
    if score_function == "softmax" and use_pre_softmax:
        probs = torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, indices)
    elif score_function == "softmax":
        probs = torch.softmax(logits.gather(1, indices), dim=-1, dtype=torch.float32)
    else:
        if score_function == "sigmoid":
            scores = torch.sigmoid(logits.float())
        else:
            assert score_function == "sqrtsoftplus"
            scores = torch.nn.functional.softplus(logits.float()).sqrt()
        scores = scores.gather(1, indices)
        probs = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20) if indices.shape[1] > 1 else scores
    if scaling_factor:
        probs = probs * scaling_factor
    return spread(logits, indices, probs.type_as(logits))


def spread(logits, indices, probs):
    routing_map = torch.zeros_like(logits).int().scatter(1, indices, 1).bool()
    return torch.zeros_like(logits).scatter(1, indices, probs), routing_map


def with_options(function, mode):
    return partial(function, **mode)
