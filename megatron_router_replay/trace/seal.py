"""The seal: a row of routes carries its token, and itself, from the place where it enters to the router that uses it.

    sealed = stamp(routes, tokens, num_experts=128)    once a sample, where the rollout enters: every id is checked
    rows = prove(batch, num_experts=128)               a micro-batch, whatever happened in between: one pass

A seal is some layers more on the layer axis, so a trainer's own code lays it out as it does routes. Its format, version 1:

    row      the ids of all layers, a byte each up to 256 experts (255 at topk=1, where 255 is filler), else two
    sum      the row's 64-bit words, zeros behind the last, each times an odd number of its own, and a start that names
             num_experts, layers and topk; modulo 2**64, all words little-endian
    seal     seal_layers(topk) * topk values below 256, whatever dtype carries them: 0xB0 + bytes of an id, then up to seven
             bytes, lowest first: the highest ones of the sum xor the lowest 24 bits of the token's id; zeros behind these

So 32 bits (topk 1 and 5) to 56 bits (topk 8 and more) tell a row that was changed, and every other token below 2**24 is told
for sure. A cast to a wider dtype changes no value. A row without a route holds the same value everywhere, the seal included:
-1, or the 255 that -1 becomes in uint8; no seal begins with these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_router_replay.checks import as_integer, as_integers
from megatron_router_replay.errors import LayoutError
from megatron_router_replay.trace.ids import MAX_EXPERTS, find_invalid_routes, narrow_ids
from megatron_router_replay.trace.runs import as_slice

if TYPE_CHECKING:
    from megatron_router_replay.engines.model_info import ModelRoutingInfo

_VERSION = 0xB0
_TOKEN = (1 << 24) - 1
_WORD = (1 << 64) - 1
_DTYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


def seal_layers(topk: int) -> int:
    """Return how many layers a seal takes: 5 at topk=1, 3 at 2, 2 at 3 and 4, else 1."""
    return -(-5 // topk)


def stamp(
    routes: Any,
    tokens: Any,
    *,
    num_experts: int | None = None,
    model: ModelRoutingInfo | None = None,
    dtype: torch.dtype | None = None,
    filler: Any = None,
    missing: str = "raise",
) -> Tensor:
    """Check a sample's routes and seal each row with its token. Call it where the rollout's routes enter the trainer.

    Ids that no router can have chosen raise here, and are not checked again later. A layer of -1, or of zeros if topk is
    above 1, may be a dense layer; without `model`, the micro-batch checks this.

    Args:
        routes: [..., layers, topk] integers, a row for each of the first tokens; all layers that the engine sends. A row of
            -1 has no route.
        tokens: [...] or longer in its last dimension: the ids of the tokens.
        num_experts: the number of experts of the model.
        model: instead of num_experts, the result of `engines.ModelRoutingInfo.from_hf_config` or `mcore.routing_info`,
            which also says which layers are dense.
        dtype: of the result, signed where the trainer pads with -1. None: uint8 up to 256 experts, else int16.
        filler: [topk] ids that the trainer wrote in every layer of a row without a route, as `range(topk)`.
        missing: "raise", or "live": a row that no router can have chosen has no route, so the live router decides it.

    Returns:
        [..., layers + seal_layers(topk), topk]. A row without a route is -1 everywhere, 255 in uint8.

    Raises:
        LayoutError: an id is no expert's, or an expert is named twice (MRR103); shapes do not fit, or an argument is unknown
            (MRR411). On a GPU an assertion of the device fails for the first, without a wait here.
    """
    routes, tokens = as_integers(routes, "routes"), as_integers(tokens, "tokens")
    tokens = tokens[..., : routes.shape[-3]] if routes.dim() >= 3 else tokens
    if routes.dim() < 3 or not routes.shape[-2] or not routes.shape[-1] or tokens.shape != routes.shape[:-2]:
        raise LayoutError(
            f"MRR411: cannot stamp routes {list(routes.shape)} with tokens {list(tokens.shape)}: give [..., layers, "
            "topk] routes and one token a row."
        )
    layers, topk = int(routes.shape[-2]), int(routes.shape[-1])
    experts = _num_experts(num_experts, model, topk)
    width, routed = _id_bytes(experts, topk), _routed_columns(model, layers)
    dtype = _carrier(dtype, width)
    if missing not in ("raise", "live"):
        raise LayoutError(f"MRR411: cannot stamp with missing={missing!r}: it is 'raise' or 'live'.")
    rows = as_stored(routes).reshape(-1, layers, topk)
    judged = judge(rows, num_experts=experts, filler=filler, routed=routed)
    if missing == "raise":
        _refuse_broken(judged.broken, rows, experts, routed)
    ids = judged.ids.flatten(1).to(_ids_dtype(width))
    words = _seal_words(ids, layers=layers, topk=topk, num_experts=experts)
    words ^= _of_token(tokens.reshape(-1).to(words.device))
    sealed = torch.zeros(len(rows), (layers + seal_layers(topk)) * topk, dtype=dtype, device=routes.device)
    sealed[:, : layers * topk] = ids
    seal = sealed[:, layers * topk :][:, :8]
    seal.copy_(words.unsqueeze(1).view(torch.uint8)[:, : seal.shape[1]])
    no_route = judged.absent | judged.broken
    if routes.is_cuda or bool(no_route.any()):
        sealed.masked_fill_(no_route.view(-1, 1), 255 if dtype is torch.uint8 else -1)
    return sealed.view(*routes.shape[:-2], layers + seal_layers(topk), topk)


def stamp_batch(routes: Sequence[Any], tokens: Sequence[Any], **options: Any) -> list[Tensor]:
    """Stamp all samples of a rollout; see `stamp`.

    A sample of T tokens has T rows or T - 1, because the engine never ran its last token. With T rows, a route in the last
    one raises, because rows that are one place too late put one there. T - 1 rows do not show that they are late, and rows
    do not show that two samples were exchanged before they were stamped. Only the agreement with the live router can.

    Args:
        routes: [T or T - 1, layers, topk] of each sample. In a last row, zeros are no route where topk is above 1.
        tokens: [T] of each sample.
        options: as of `stamp`.

    Raises:
        LayoutError: as `stamp`; there is another number of samples or of rows (MRR411), or a last token has a route (MRR103).
    """
    if len(routes) != len(tokens):
        raise LayoutError(f"MRR411: cannot stamp routes of {len(routes)} samples with tokens of {len(tokens)}.")
    stamped = []
    for i, (values, ids) in enumerate(zip(routes, tokens)):
        rows, ids = as_integers(values, f"routes of sample {i}"), as_integers(ids, f"tokens of sample {i}")
        if rows.dim() != 3 or ids.dim() != 1 or len(rows) > len(ids):
            raise LayoutError(
                f"MRR411: sample {i} has routes {list(rows.shape)} and tokens {list(ids.shape)}: give [T or fewer, layers, "
                "topk] and [T]."
            )
        try:
            if len(rows) == len(ids) and len(ids):
                rows = _without_a_last_route(rows, options.get("filler"))
            stamped.append(stamp(rows, ids, **options))
        except LayoutError as error:
            raise LayoutError(f"MRR411: cannot stamp sample {i}: {error}") from error
    return stamped


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of routes, and what is known of each; copies.

    Args:
        ids: [n, layers, topk] uint8 or int16: legal experts, or filler in some layers of a row.
            Rows that are absent or broken hold experts 0, 1, ...
        absent: [n] bool, True: the row has no route.
        broken: [n] bool, True: the row is neither a route nor absent.
        words: [n] int64: where a row is as it was sealed, the lowest 24 bits of its token's id << 8, else no token's;
            None: rows without a seal.
    """

    ids: Tensor
    absent: Tensor
    broken: Tensor
    words: Tensor | None = None

    def of_other_tokens(self, token_ids: Tensor) -> Tensor:
        """Return [n] bool on the device of token_ids, [n]: the row is broken, or was sealed with another token."""
        assert self.words is not None, "sealed rows"
        words, absent = (_to(each, token_ids.device) for each in (self.words, self.absent))
        return (words != _of_token(token_ids)) & ~absent

    def lack_a_layer(self) -> Tensor:
        """Return [n] bool, True: a sealed row holds filler in one of its layers."""
        if self.ids.device.type == "cpu" and not _holds_filler(self.ids.numpy()):
            return torch.zeros_like(self.absent)
        first, last = self.ids[:, :, 0], self.ids[:, :, -1]
        is_filler = first == last if self.ids.shape[2] > 1 else first == (255 if first.dtype is torch.uint8 else -1)
        return is_filler.any(1) & ~(self.absent | self.broken)

    def without(self, mask: Tensor) -> Rows:
        """Return them with the rows where the mask is True absent."""
        return replace(self, ids=_legal_where(mask, self.ids), absent=self.absent | mask)


def prove(batch: Tensor, *, num_experts: int, filler: Any = None) -> Rows:
    """Tell rows that are as `stamp` sealed them from those that are absent or broken, and for which token; nobody waits.

    Args:
        batch: [n, layers and seal, topk], any integer dtype.
        num_experts: of the model.
        filler: [topk] ids that the trainer wrote in every layer, the seal's too, of a row without a route.

    Raises:
        LayoutError: there are no more layers than a seal takes.
    """
    num_rows, both, topk = batch.shape
    layers = both - seal_layers(topk)
    if layers < 1:
        raise LayoutError(
            f"MRR411: routes of {both} layers hold no seal, which takes {seal_layers(topk)} at topk={topk}: stamp them where "
            "the rollout enters the trainer, with mrr.stamp, and feed all layers."
        )
    flat = as_stored(batch).flatten(1)
    narrow = flat.to(_ids_dtype(_id_bytes(num_experts, topk)))
    ids, seals = narrow[:, : layers * topk], narrow[:, layers * topk :]
    words = _seal_words(ids, layers=layers, topk=topk, num_experts=num_experts) ^ _stored_words(seals)
    if flat.element_size() > narrow.element_size():
        words.masked_fill_(_changed_by_cast(flat, narrow, num_ids=layers * topk), -1)
    unsealed = (words & ~(_TOKEN << 8)) != 0
    absent = _absent(flat, unsealed, (-1, 255), filler, layers=both)
    copied = ids.clone() if narrow is flat else ids
    return Rows(
        ids=_legal_where(unsealed, copied.view(num_rows, layers, topk)),
        absent=absent,
        broken=unsealed ^ absent,
        words=words,
    )


OTHER_TOKENS = (
    "routes are of other tokens than the model gets at their positions: the trainer lays routes out in another order than "
    "tokens (context parallelism, padding side, [s, b]), or cut one of the two; or they are not as they were stamped."
)
"""What is wrong with a row, where the host cannot look."""


def explain(batch: Tensor, rows: Rows, wrong: Tensor, token_ids: Tensor, *, num_experts: int) -> str:
    """Say what is wrong with the first row that is not its token's, and what to do.

    Args:
        batch: as `prove` got it, and `rows` as it said.
        wrong: [n] bool on the host; the rows that are one of the two and no padding.
        token_ids: [n].
    """
    first, topk = int(wrong.nonzero()[0]), batch.shape[2]
    assert rows.words is not None, "sealed rows"
    head, token = f"row {first} ({int(wrong.sum())} in all)", int(token_ids[first])
    if not rows.broken[first]:
        return f"{head} is the row of token {int(rows.words[first]) >> 8}, the model gets {token} there: {OTHER_TOKENS}"
    layers, width = batch.shape[1] - seal_layers(topk), _id_bytes(num_experts, topk)
    row = as_stored(batch[first]).reshape(1, -1).to(_ids_dtype(width))
    stored = int(_stored_words(row[:, layers * topk :]))
    tag = stored & 255
    if tag & ~0xF != _VERSION:
        return (
            f"{head} bears no seal: stamp routes where the rollout enters the trainer, with mrr.stamp of this release, and "
            "feed all layers; the chunk selects its own. Name what stands in rows without a route: padding=, filler=."
        )
    if tag != _VERSION + width:
        return (
            f"{head} was sealed with {tag - _VERSION} bytes an id, the model's {num_experts} experts take {width}: say "
            "the model's num_experts where routes are stamped."
        )
    starts = torch.tensor([_start(experts, layers, topk) for experts in range(1, MAX_EXPERTS + 1)])
    sealed = _first_bytes(_sums(row[:, : layers * topk]) + starts, topk, width)
    same = sealed ^ stored == (token & _TOKEN) << 8
    if same.any():
        return f"{head} was sealed for a model of {int(same.nonzero()[0]) + 1} experts, this one has {num_experts}."
    return (
        f"{head} is not as it was stamped: ids were changed, or layers cut or exchanged. Feed all layers that were stamped; "
        "the chunk selects its own."
    )


def judge(routes: Tensor, *, num_experts: int, filler: Any = None, routed: Sequence[int] | None = None) -> Rows:
    """Tell rows that a router can have chosen from those that are absent or broken, for routes without a seal.

    Args:
        routes: [n, layers, topk], any integer dtype.
        num_experts: of the model.
        filler: [topk] ids that the trainer wrote in every layer of a row without a route.
        routed: the layers that must hold routes, while all others hold filler. None: each layer of a row may be filler (-1,
            or zeros where topk is above 1), and one must not be.
    """
    if routes.device.type == "cpu":
        rows = _judged_fast(routes.numpy(), num_experts=num_experts, filler=filler, routed=routed)
        if rows is not None:
            return rows
    num_rows, layers, topk = routes.shape
    fillers = _filler_values(routes.dtype, num_experts, topk)
    flat = routes.flatten(1)
    absent = _absent(flat, _begins_like_filler(flat, fillers, filler), fillers, filler, layers=layers)
    ordered = routes.to(torch.int64).sort(2).values  # torch takes 255 for -1 where it compares uint8 with a number
    lowest, highest = ordered[:, :, 0], ordered[:, :, -1]
    is_route = (lowest >= 0) & (highest < num_experts) & ~(ordered[:, :, 1:] == ordered[:, :, :-1]).any(2)
    is_filler = (lowest == highest) & torch.stack([lowest == value for value in (0, *fillers)]).any(0)
    if routed is None:
        is_filler &= ~is_route
        broken = ~(is_route | is_filler).all(1) | is_filler.all(1)
    else:
        must = torch.tensor([place in routed for place in range(layers)])
        broken = ~torch.where(_to(must, routes.device), is_route, is_filler).all(1)
    ids = routes.to(_ids_dtype(_id_bytes(num_experts, topk)), copy=True)
    return Rows(ids=_legal_where(absent | broken, ids), absent=absent, broken=broken & ~absent)


def as_stored(values: Tensor) -> Tensor:
    """Return integers in a dtype that torch computes with; narrow ones stay narrow, for widening costs more than a check."""
    return values if values.dtype in _DTYPES else values.to(torch.int64)


# ---- the format


def _id_bytes(num_experts: int, topk: int) -> int:
    """Return how many bytes of an id the sum takes; 255 is no expert's where one id is a whole route."""
    return 1 if num_experts + (topk == 1) <= 256 else 2


def _ids_dtype(width: int) -> torch.dtype:
    return torch.uint8 if width == 1 else torch.int16


def _as_words(rows: Tensor) -> Tensor:
    """Return rows of bytes or of int16, [n, count], as 64-bit words, zeros behind the last; a view where they are words."""
    num_rows, count = rows.shape
    per_word = 8 // rows.element_size()
    if rows.stride(1) != 1 or any(number % per_word for number in (count, rows.stride(0), rows.storage_offset())):
        padded = rows.new_zeros(num_rows, -(-count // per_word) * per_word)
        padded[:, :count] = rows
        rows = padded
    return rows.view(torch.int64)


def _seal_words(ids: Tensor, *, layers: int, topk: int, num_experts: int) -> Tensor:
    """Return the first 8 bytes of the seal that each row of narrow ids has for token 0, [n] int64."""
    return _first_bytes(_sums(ids) + _start(num_experts, layers, topk), topk, ids.element_size())


def _sums(ids: Tensor) -> Tensor:
    """Return the weighted sum of each row's words, [n] int64."""
    words = _as_words(ids)
    weights = _weights(words.shape[1])
    if words.device.type == "cpu":  # einsum takes two thirds of the time of torch's product
        return torch.from_numpy(np.einsum("ij,j->i", words.numpy(), weights.numpy()))
    return (words * _to(weights, words.device)).sum(1)  # a GPU has no product of int64 matrices


def _first_bytes(totals: Tensor, topk: int, width: int) -> Tensor:
    """Return the first 8 bytes of seals with these totals, of ids of `width` bytes."""
    bits = 8 * min(7, seal_layers(topk) * topk - 1)
    high = (totals >> (64 - bits)) & ((1 << bits) - 1)
    return (high << 8) | (_VERSION + width)


def _of_token(token_ids: Tensor) -> Tensor:
    """Return by what a token with this id changes the first 8 bytes of a seal."""
    return (token_ids.to(torch.int64) & _TOKEN) << 8


def _stored_words(seals: Tensor) -> Tensor:
    """Return the first 8 bytes of seals [n, values], [n] int64; zeros behind shorter ones."""
    return _as_words(seals[:, :8].to(torch.uint8))[:, 0]


def _mixed(number: int) -> int:
    """Return 64 bits that depend on all bits of a number, as a signed one. Source: splitmix64's finalizer."""
    z = (number + 1) * 0x9E3779B97F4A7C15 & _WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
    z ^= z >> 31
    return z - (z >> 63 << 64)


def _start(num_experts: int, layers: int, topk: int) -> int:
    return _mixed(1 << 63 | num_experts << 40 | layers << 20 | topk)


@lru_cache(maxsize=16)
def _weights(count: int) -> Tensor:
    return torch.tensor([_mixed(i) | 1 for i in range(count)], dtype=torch.int64)


# ---- which rows are what


def _filler_values(dtype: torch.dtype, num_experts: int, topk: int) -> tuple[int, ...]:
    """Return what an id is where an engine, or a cast, says that there is no route."""
    return (-1,) if dtype.is_signed else (255,) if _id_bytes(num_experts, topk) == 1 else ()


def _begins_like_filler(flat: Tensor, fillers: Sequence[int], named: Any) -> Tensor:
    """Return [n] bool, True: the row's first value is filler. Few rows begin so, and the others are not read on."""
    return _is_one_of(flat[:, 0], fillers if named is None else (*fillers, int(named[0])))


def _is_one_of(values: Tensor, numbers: Sequence[int]) -> Tensor:
    found = torch.zeros_like(values, dtype=torch.bool)
    for number in numbers:
        found |= values == number
    return found


def _absent(flat: Tensor, candidates: Tensor, fillers: Sequence[int], named: Any, *, layers: int) -> Tensor:
    """Return [n] bool, True: a candidate that holds filler everywhere.

    Args:
        flat: [n, values].
        candidates: [n] bool, the rows that may.
        fillers: one of these stands everywhere; or
        named: [topk] the trainer's own, in each of `layers`; None: it has none.
    """
    if flat.device.type == "cpu":
        places = candidates.nonzero().squeeze(1)
        if not len(places):
            return torch.zeros_like(candidates)
        return torch.zeros_like(candidates).index_copy_(
            0, places, _is_filler(flat[places], fillers, named, layers=layers)
        )
    return candidates & _is_filler(flat, fillers, named, layers=layers)


def _is_filler(flat: Tensor, fillers: Sequence[int], named: Any, *, layers: int) -> Tensor:
    is_filler = (flat == flat[:, :1]).all(1) & _is_one_of(flat[:, 0], fillers)
    if named is not None:
        named = _to(torch.as_tensor(named, dtype=torch.int64), flat.device).to(flat.dtype).repeat(layers)
        is_filler |= (flat == named).all(1)
    return is_filler


def _changed_by_cast(flat: Tensor, narrow: Tensor, *, num_ids: int) -> Tensor:
    """Return [n] bool, True: an id of the row does not fit into the bytes that the sum takes of it, or a seal's into one."""
    if flat.device.type == "cpu":
        unsigned = flat.numpy().view(f"u{flat.element_size()}")  # as which a -1 is the highest
        limit = 256 if narrow.dtype is torch.uint8 else 32768
        if int(unsigned.max(initial=0)) < limit:
            return torch.zeros(len(flat), dtype=torch.bool)
        if limit == 256:
            return torch.from_numpy(unsigned.max(axis=1) >= limit)
    return (narrow[:, :num_ids] != flat[:, :num_ids]).any(1) | ((flat[:, num_ids:] & ~255) != 0).any(1)


def _holds_filler(ids: npt.NDArray[Any]) -> bool:
    """Return whether rows [n, layers, topk] of routes and filler hold filler: -1, or zeros of topk above 1."""
    topk, num_bytes = ids.shape[2], ids.shape[2] * ids.itemsize
    if num_bytes not in (1, 2, 4, 8):
        return bool((ids[:, :, 0] == ids[:, :, -1]).any())
    layers = ids.view(f"u{num_bytes}")  # a layer is one number, and its range is found without a temporary
    return int(layers.max(initial=0)) == np.iinfo(layers.dtype).max or (topk > 1 and int(layers.min(initial=1)) == 0)


def _legal_where(mask: Tensor, ids: Tensor) -> Tensor:
    """Return rows with experts 0, 1, ... where the mask is True; on a CPU in place."""
    legal = torch.arange(ids.shape[2], dtype=ids.dtype, device=ids.device)
    if ids.device.type != "cpu":
        return torch.where(mask.view(-1, 1, 1), legal, ids)
    places = mask.nonzero().squeeze(1)
    return ids.index_copy_(0, places, legal.expand(len(places), *ids.shape[1:])) if len(places) else ids


def _judged_fast(rows: npt.NDArray[Any], *, num_experts: int, filler: Any, routed: Sequence[int] | None) -> Rows | None:
    """Judge rows on the host if all of them are sound: one pass, and some layers hold filler in all rows; else None."""
    num_rows, layers, topk = rows.shape
    fillers = _filler_values(torch.from_numpy(rows).dtype, num_experts, topk)
    flat = torch.from_numpy(rows).flatten(1)
    absent = _absent(flat, _begins_like_filler(flat, fillers, filler), fillers, filler, layers=layers)
    known = ~absent.numpy()
    if routed is None:
        first = rows[int(known.argmax())] if num_rows else rows.reshape(-1, topk)
        dense = [i for i, ids in enumerate(first) if (ids == ids[0]).all() and ids[0] in (*fillers, *[0][: topk - 1])]
    else:
        dense = [place for place in range(layers) if place not in routed]
    is_filler = np.isin(rows[:, dense], (0, *fillers)).all(axis=(1, 2))
    routed = [place for place in range(layers) if place not in dense]
    if not routed or not bool((is_filler | ~known).all()):
        return None
    span = as_slice(routed)
    narrow, fault = narrow_ids(rows[:, span], known, num_experts=num_experts)
    if fault is not None:
        return None
    ids = narrow
    if dense:
        ids = np.empty(rows.shape, np.uint8 if _id_bytes(num_experts, topk) == 1 else np.int16)
        ids[:, routed], ids[:, dense] = narrow, rows[:, dense]
        ids[~known] = np.arange(topk)
    return Rows(ids=torch.from_numpy(ids), absent=absent, broken=torch.zeros(num_rows, dtype=torch.bool))


def _to(values: Tensor, device: torch.device) -> Tensor:
    """Return values of the host on a device, without a wait: from page-locked memory."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


# ---- what a caller says


def _num_experts(num_experts: int | None, model: ModelRoutingInfo | None, topk: int) -> int:
    if (num_experts is None) == (model is None):
        raise LayoutError(
            "MRR411: to stamp routes, say num_experts=, or model= (mrr.engines.ModelRoutingInfo.from_hf_config(...))."
        )
    if model is not None and model.topk != topk:
        raise LayoutError(f"MRR411: routes name {topk} experts a token, the model's topk is {model.topk}.")
    count: Any = num_experts if model is None else model.num_experts
    return as_integer("num_experts", count, least=1, most=MAX_EXPERTS, error=LayoutError)


def _routed_columns(model: ModelRoutingInfo | None, layers: int) -> list[int] | None:
    """Return the columns of MoE layers where the model is known."""
    if model is None:
        return None
    if layers not in (model.num_layers, len(model.moe_layer_numbers)):
        raise LayoutError(
            f"MRR411: routes have {layers} layers; the model has {model.num_layers}, of which "
            f"{len(model.moe_layer_numbers)} route. Stamp all layers of the engine's reply; if those of multi-token "
            "prediction are among them, say num_experts= in place of model=."
        )
    return [n - 1 for n in model.moe_layer_numbers] if layers == model.num_layers else list(range(layers))


def _carrier(dtype: torch.dtype | None, width: int) -> torch.dtype:
    if dtype is None:
        return _ids_dtype(width)
    if dtype not in _DTYPES or dtype.itemsize < width:
        raise LayoutError(
            f"MRR411: cannot stamp as {dtype}: give {'torch.uint8, ' * (width == 1)}int16, int32 or int64."
        )
    return dtype


def _refuse_broken(broken: Tensor, rows: Tensor, num_experts: int, routed: Sequence[int] | None) -> None:
    if broken.device.type != "cpu":
        torch._assert_async(~broken.any(), "MRR103: routes that were stamped are none that a router can have chosen.")
        return
    if not bool(broken.any()):
        return
    first = int(broken.nonzero()[0])
    columns = list(range(rows.shape[1])) if routed is None else list(routed)
    if routed is None:  # which may hold filler, but not all of them
        row = rows[first].tolist()
        columns = [i for i in columns if set(row[i]) not in ({0}, {-1})] or columns
    fault = find_invalid_routes(rows[first : first + 1, columns].numpy(), num_experts=num_experts)
    where = "dense layers hold routes." if fault is None else fault.describe([i + 1 for i in columns], first_row=first)
    raise LayoutError(
        f"MRR103: cannot stamp routes that no router can have chosen ({int(broken.sum())} rows): {where} Zeros are lost "
        "data; name the trainer's filler with filler=, or say missing='live' to leave such rows to the live router."
    )


def _without_a_last_route(rows: Tensor, filler: Any) -> Tensor:
    """Return the T - 1 first of T rows; the last one must hold no route."""
    last = rows[-1].to(torch.int64)
    topk = last.shape[1]
    is_filler = (last == last[:1, :1]).all() & ((last[0, 0] < int(topk > 1)) | (last[0, 0] == 255))
    if filler is not None:
        is_filler |= (last == torch.as_tensor(filler, device=last.device)).all()
    message = (
        "MRR103: the row of the last token holds a route: an engine has none for it, so all rows are one too late, or it is "
        "a copy. Stamp the engine's own rows."
    )
    if rows.is_cuda:
        torch._assert_async(is_filler, message)
    elif not bool(is_filler):
        raise LayoutError(message)
    return rows[:-1]
