# mypy: ignore-errors
# ruff: noqa: N803
"""The Triton kernels of `route`: each program turns a block of rows into dense probabilities and map, or gradients.

A row's chosen experts are a small tile [rows, topk]; it is scored there, then spread over the dense row that is stored
once, coalesced. Nothing is zeroed first and nothing is scattered. Rounding happens where Megatron-Core's tensors have
their dtype (`_round`); in between it is float32.

Source: Megatron-Core 0.16.1, moe_utils.topk_routing_with_score_function, and what autograd makes of it.
"""

# No `from __future__ import annotations`: Triton reads the annotations.
import triton
import triton.language as tl

SOFTMAX: tl.constexpr = tl.constexpr(0)  # the values of score.Score
PRE_SOFTMAX: tl.constexpr = tl.constexpr(1)
SIGMOID: tl.constexpr = tl.constexpr(2)
NORMALISED_SIGMOID: tl.constexpr = tl.constexpr(3)


@triton.jit
def _round(values, dtype: tl.constexpr):
    """Return float32 values as they are once stored in dtype."""
    return values.to(dtype).to(tl.float32)


@triton.jit
def _load_ids(topk_indices, rows, row_stride, slot_stride, slots, used, num_experts):
    """Return ([rows, slots] int32 expert ids, where they name an expert)."""
    ids = tl.load(topk_indices + rows[:, None] * row_stride + slots[None, :] * slot_stride, mask=used, other=0)
    ids = ids.to(tl.int64)
    valid = used & (ids >= 0) & (ids < num_experts)
    return tl.where(valid, ids, -1).to(tl.int32), valid


@triton.jit
def _spread(ids, values, empty, slots, experts, TOPK: tl.constexpr):
    """Return [rows, experts] float32: the value of each chosen expert, `empty` elsewhere."""
    dense = tl.full([ids.shape[0], experts.shape[0]], empty, tl.float32)
    for slot in tl.static_range(TOPK):
        is_slot = slots[None, :] == slot
        expert = tl.sum(tl.where(is_slot, ids, 0), axis=1)
        value = tl.sum(tl.where(is_slot, values, 0.0), axis=1)
        dense = tl.where(experts[None, :] == expert[:, None], value[:, None], dense)
    return dense


@triton.jit
def _dense_softmax(logits, places, mask, chosen):
    """Return (softmax of each row [rows, experts], that of its chosen logits [rows, slots]), float32."""
    values = tl.load(logits + places, mask=mask, other=float("-inf")).to(tl.float32)
    largest = tl.max(values, axis=1)[:, None]
    powers = tl.where(mask, tl.exp(values - largest), 0.0)
    total = tl.sum(powers, axis=1)[:, None]
    return powers / total, tl.exp(chosen - largest) / total


@triton.jit
def route_forward(
    logits,  # [num_tokens, num_experts], contiguous
    topk_indices,  # [num_tokens, topk], any strides
    routing_probs,  # out: as logits
    routing_map,  # out: [num_tokens, num_experts] uint8
    scores,  # out: [num_tokens, topk] float32, contiguous; not for PRE_SOFTMAX
    num_tokens,
    num_experts,
    index_row_stride,
    index_slot_stride,
    scaling_factor,
    SCORE: tl.constexpr,
    SCALED: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Probabilities and map of ROWS rows; SLOTS and EXPERTS are TOPK and num_experts, rounded up to powers of two."""
    dtype = logits.dtype.element_ty
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    slots = tl.arange(0, SLOTS)
    experts = tl.arange(0, EXPERTS)
    used = (rows < num_tokens)[:, None] & (slots < TOPK)[None, :]
    mask = (rows < num_tokens)[:, None] & (experts < num_experts)[None, :]
    places = rows[:, None] * num_experts + experts[None, :]

    ids, valid = _load_ids(topk_indices, rows, index_row_stride, index_slot_stride, slots, used, num_experts)
    chosen = tl.load(logits + rows[:, None] * num_experts + ids, mask=valid, other=float("-inf")).to(tl.float32)
    if SCORE == SOFTMAX:
        powers = tl.where(valid, tl.exp(chosen - tl.max(chosen, axis=1)[:, None]), 0.0)
        score = powers / tl.sum(powers, axis=1)[:, None]
    elif SCORE == PRE_SOFTMAX:
        _, score = _dense_softmax(logits, places, mask, chosen)
    else:
        score = tl.where(valid, 1.0 / (1.0 + tl.exp(-chosen)), 0.0)
    if SCORE != PRE_SOFTMAX:
        tl.store(scores + rows[:, None] * TOPK + slots[None, :], score, mask=used)

    probs = _round(score, dtype)
    if SCORE == NORMALISED_SIGMOID:
        total = _round(_round(tl.sum(probs, axis=1), dtype) + 1e-20, dtype)
        probs = _round(probs / total[:, None], dtype)
    if SCALED:
        probs = _round(probs * scaling_factor, dtype)
    dense = _spread(ids, probs, float("-inf"), slots, experts, TOPK)
    routed = dense != float("-inf")
    # A kernel cannot raise: a row that does not name TOPK distinct experts must not look like a routed one.
    distinct = tl.sum(routed.to(tl.int32), axis=1) == TOPK
    dense = tl.where(distinct[:, None], tl.where(routed, dense, 0.0), float("nan"))
    tl.store(routing_probs + places, dense.to(dtype), mask=mask)
    tl.store(routing_map + places, routed.to(tl.uint8), mask=mask)


@triton.jit
def route_backward(
    grad_probs,  # [num_tokens, num_experts], any strides
    topk_indices,  # [num_tokens, topk], any strides
    scores,  # [num_tokens, topk] float32, contiguous; for PRE_SOFTMAX the logits [num_tokens, num_experts]
    grad_logits,  # out: [num_tokens, num_experts], contiguous
    num_tokens,
    num_experts,
    grad_row_stride,
    grad_expert_stride,
    index_row_stride,
    index_slot_stride,
    scaling_factor,
    SCORE: tl.constexpr,
    SCALED: tl.constexpr,
    TOPK: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Gradients of the logits of ROWS rows."""
    dtype = grad_logits.dtype.element_ty
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    slots = tl.arange(0, SLOTS)
    experts = tl.arange(0, EXPERTS)
    used = (rows < num_tokens)[:, None] & (slots < TOPK)[None, :]
    mask = (rows < num_tokens)[:, None] & (experts < num_experts)[None, :]
    places = rows[:, None] * num_experts + experts[None, :]

    ids, valid = _load_ids(topk_indices, rows, index_row_stride, index_slot_stride, slots, used, num_experts)
    taken = grad_probs + rows[:, None] * grad_row_stride + ids.to(tl.int64) * grad_expert_stride
    grad = tl.load(taken, mask=valid, other=0.0).to(tl.float32)
    if SCALED:
        grad = _round(grad * scaling_factor, dtype)
    if SCORE == PRE_SOFTMAX:
        chosen = tl.load(scores + rows[:, None] * num_experts + ids, mask=valid, other=float("-inf")).to(tl.float32)
        softmax, score = _dense_softmax(scores, places, mask, chosen)
        dense = _spread(ids, grad, 0.0, slots, experts, TOPK)
        dense = (dense - tl.sum(grad * score, axis=1)[:, None]) * softmax
    else:
        score = tl.load(scores + rows[:, None] * TOPK + slots[None, :], mask=used, other=0.0)
        if SCORE == SOFTMAX:
            grad = (grad - tl.sum(grad * score, axis=1)[:, None]) * score
        else:
            if SCORE == NORMALISED_SIGMOID:
                probs = _round(score, dtype)
                total = _round(_round(tl.sum(probs, axis=1), dtype) + 1e-20, dtype)[:, None]
                share = _round(-grad * _round(_round(probs / total, dtype) / total, dtype), dtype)
                share = _round(tl.sum(share, axis=1), dtype)[:, None]
                grad = _round(_round(grad / total, dtype) + share, dtype)
            grad = grad * (1.0 - score) * score
        dense = _spread(ids, grad, 0.0, slots, experts, TOPK)
    tl.store(grad_logits + places, dense.to(dtype), mask=mask)
