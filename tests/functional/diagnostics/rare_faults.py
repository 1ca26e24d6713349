"""Faults that were written before the search for facts was read, and exchanged ids, for which it was wrong once.

python -m tests.functional.diagnostics.rare_faults [--texts]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megatron_router_replay as mrr
from tests.functional.diagnostics.model_faults import (
    EMBEDDING,
    LAYER_3,
    LAYER_4,
    ROUNDING,
    ROUTER,
    UNRELATED,
    Case,
    Traces,
    print_cases,
)
from tests.functional.diagnostics.small_model import (
    BIASED,
    Change,
    expert,
    in_order,
    layer,
    noise_like,
    random_samples,
    record_routes,
)

CAPTURED = "recorded or captured wrongly"
IDS = "experts have different ids: .*recorded wrongly, a different order in the checkpoint, or rows of a router"
SAME_MODEL = "have different ids and compute the same"
NOT_BOTH = "in a different order, and not both: later layers differ"
PAIR = "name expert 3 as 5 and 5 as 3"
PLACES = "rows of one trace lie at other places"
REPEATED = "one route is repeated"
FIRST_ROW = "attends to no other row agrees"


# Changes of the model.


def drop_attention_residual(model: Any) -> None:
    one = layer(model, 3)
    add = one.self_attn_bda
    one.self_attn_bda = lambda *options: lambda output, residual, p: add(*options)(output, residual * 0, p)


def copy_router(model: Any) -> None:
    layer(model, 4).mlp.router.weight.copy_(layer(model, 5).mlp.router.weight)


def two_biases(model: Any) -> None:
    bias = layer(model, 4).mlp.router.expert_bias
    bias[5] += 0.5
    bias[9] -= 0.5


def every_bias(model: Any) -> None:
    for number in range(1, 7):
        layer(model, number).mlp.router.expert_bias[3 * number] += 0.3


def rotate_rows(model: Any, numbers: Iterable[int] = (3,)) -> None:
    for number in numbers:
        weight = layer(model, number).mlp.router.weight
        weight[[3, 7, 12]] = weight[[7, 12, 3]]


def exchange(numbers: Iterable[int], with_experts: bool) -> Change:
    """Exchange rows 3 and 5 of routers, and their experts."""

    def change(model: Any) -> None:
        for number in numbers:
            weight = layer(model, number).mlp.router.weight
            weight[[3, 5]] = weight[[5, 3]]
            for name in ("linear_fc1", "linear_fc2") if with_experts else ():
                one, other = (getattr(expert(model, number, index), name).weight for index in (3, 5))
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)

    return change


def twins(model: Any) -> None:
    """Expert 3's router rows nearly equal those of expert 2: rounding exchanges the two."""
    for each in model.decoder.layers:
        weight = each.mlp.router.weight
        weight[3] = weight[2] + 1e-4 * noise_like(weight[2])


def redraw_token_0(model: Any) -> None:
    weight = model.embedding.word_embeddings.weight
    weight[0] = noise_like(weight[0]) * weight.std()


def drift(scale: float) -> Change:
    def change(model: Any) -> None:
        for index, weight in enumerate(model.parameters()):
            weight *= 1 + scale * noise_like(weight, seed=index).sign()

    return change


# Edits of routes: [num_tokens, num_layers, topk], or [rows of a sample, ...] and the sample's number.


def random_routes(like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(*like.shape[:-1], 32, generator=generator).topk(like.shape[-1], dim=-1).indices


def chance(shape: tuple[int, ...], share: float) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < share


def exchange_ids(routes: Tensor, one: int = 3, other: int = 5) -> Tensor:
    return torch.where(routes == one, other, torch.where(routes == other, one, routes))


def store_3_as_5(routes: Tensor) -> Tensor:
    return torch.where((routes == 3) & ~(routes == 5).any(-1, keepdim=True), 5, routes)


def exchange_blocks(routes: Tensor) -> Tensor:
    return torch.where(routes // 8 == 1, routes + 8, torch.where(routes // 8 == 2, routes - 8, routes))


def a_pair_of_each_layer(routes: Tensor) -> Tensor:
    return torch.stack([exchange_ids(routes[:, i], i, i + 12) for i in range(6)], dim=1)


def rot(routes: Tensor) -> Tensor:
    return torch.where(chance(routes.shape[:2], 0.1).unsqueeze(2), random_routes(routes, 4), routes)


def rot_layer_4(routes: Tensor) -> Tensor:
    routes[:, 3] = torch.where(chance(routes.shape[:1], 0.2).unsqueeze(1), random_routes(routes[:, 3], 4), routes[:, 3])
    return routes


def last_expert_of_the_row_before(routes: Tensor) -> Tensor:
    last = routes[:, :, 3].roll(1, 0)
    routes[:, :, 3] = torch.where((last.unsqueeze(2) == routes[:, :, :3]).any(2), routes[:, :, 3], last)
    return routes


def fill_every_fourth(routes: Tensor) -> Tensor:
    routes[::4] = torch.arange(4)
    return routes


def even_before_odd(routes: Tensor) -> Tensor:
    return torch.cat([routes[::2], routes[1::2]])


def late_by_1_to_3(routes: Tensor, sample: int) -> Tensor:
    late = 1 + sample % 3
    return torch.cat([routes[:late], routes[:-late]])


def fill_16_rows(routes: Tensor, sample: int) -> Tensor:
    routes[:16] = torch.arange(4)
    return routes


def reverse_a_sample(routes: Tensor, sample: int) -> Tensor:
    return routes.flip(0) if sample == 6 else routes


def shuffle_but_first(routes: Tensor, sample: int) -> Tensor:
    order = torch.randperm(len(routes) - 1, generator=torch.Generator().manual_seed(sample))
    return torch.cat([routes[:1], routes[1:][order]])


def zigzag(routes: Tensor, sample: int) -> Tensor:
    quarter = len(routes) // 4
    one, two, three, four, rest = routes.split([quarter] * 4 + [len(routes) - 4 * quarter])
    return torch.cat([one, four, two, three, rest])


def rare_cases(seed: int = 0) -> list[Case]:
    """Return the faults in a model with weights and tokens of this seed."""
    samples = random_samples(seed=31 + seed)
    routes = partial(record_routes, seed=77 + seed)
    plain, biased = routes(samples), routes(samples, **BIASED)
    token_of_22_rows = next(token for token in range(1, 320) if int((plain.token_ids == token).sum()) in range(15, 30))

    def changed(change: Change | None = None, **options: Any) -> Callable[[], Traces]:
        return lambda: (plain, routes(samples, change, **options))

    def edited(edit: Callable[[Tensor], Tensor]) -> Callable[[], Traces]:
        ids = plain.topk_indices
        return lambda: (plain, plain._with(topk_indices=edit(ids.long()).to(ids.dtype)))

    def in_layer(index: int, edit: Callable[[Tensor], Tensor]) -> Callable[[], Traces]:
        def edit_layer(ids: Tensor) -> Tensor:
            ids[:, index] = edit(ids[:, index])
            return ids

        return edited(edit_layer)

    def in_samples(edit: Callable[[Tensor, int], Tensor]) -> Callable[[], Traces]:
        lengths = [len(sample) for sample in samples]
        return edited(lambda ids: torch.cat([edit(part, i) for i, part in enumerate(ids.split(lengths))]))

    def rows_of_a_token(ids: Tensor) -> Tensor:
        rows = plain.token_ids == token_of_22_rows
        ids[rows] = random_routes(ids[rows], 2)
        return ids

    def half(change: Change | None = None, **options: Any) -> Callable[[], Traces]:
        other = routes(samples[6:], change, **options)
        return lambda: (plain, mrr.concat_traces([*list(plain.samples())[:6], *other.samples()]))

    def case(name: str, make: Callable[[], Traces], *right: str, wrong: tuple[str, ...] = (), **more: Any) -> Case:
        return Case(name=name, truth=name, make=make, right=right, wrong=wrong, **more)

    everywhere = range(1, 7)
    order = [11, 3, 7, 0, 1, 2, 4, 5, 6, 8, 9, 10]
    confident = (ROUNDING, REPEATED, UNRELATED)
    return [
        case("control", changed(), "traces are the same"),
        case("control, biased", lambda: (biased, routes(samples, **BIASED)), "traces are the same"),
        case("control, another order of samples", lambda: (plain, in_order(plain, order)), "traces are the same"),
        # Ids of experts: none of these is a token, an expert's bias, or a layer that was captured wrongly.
        *(
            case(name, make, *right, wrong=("rows with token", "alone differs", "prefers? expert", "avoids? expert"))
            for name, make, right in (
                ("recorded ids 3 and 5 of layer 2", in_layer(1, exchange_ids), (PAIR, SAME_MODEL)),
                ("recorded ids 3 and 5 of the last layer", in_layer(5, exchange_ids), (PAIR, IDS)),
                ("recorded ids 3 and 5 of all layers", edited(exchange_ids), (PAIR, IDS)),
                (
                    "a recorded pair of each layer",
                    edited(a_pair_of_each_layer),
                    ("a few experts by different ids", IDS),
                ),
                (
                    "recorded ids 2i and 2i + 1 of layer 4",
                    in_layer(3, lambda ids: ids ^ 1),
                    ("different id", SAME_MODEL),
                ),
                ("recorded ids of two ranks", edited(exchange_blocks), ("by a different id", IDS)),
                ("3 recorded as 5", edited(store_3_as_5), ("name expert 3 as 5, in all layers", IDS)),
                ("rows and experts 3 and 5 of layer 1", changed(exchange([1], True)), (PAIR, SAME_MODEL)),
                ("rows and experts 3 and 5 of all layers", changed(exchange(everywhere, True)), (PAIR, IDS)),
                ("rows 3 and 5 of layer 3", changed(exchange([3], False)), (PAIR, "layer 3 has its .*" + NOT_BOTH)),
                ("rows 3 and 5 of all layers", changed(exchange(everywhere, False)), (PAIR, NOT_BOTH)),
                ("rows 3 and 5 of the last layer", changed(exchange([6], False)), (PAIR, IDS)),
                ("three rows of layer 3", changed(rotate_rows), ("3 as 12, 7 as 3 and 12 as 7", NOT_BOTH)),
                (
                    "rows and experts 3 and 5 of layer 3, bf16",
                    changed(exchange([3], True), bf16=True),
                    (PAIR, SAME_MODEL, r"rounding \(another"),
                ),
            )
        ),
        case(
            "twins 2 and 3 in bf16",
            lambda: (routes(samples, twins), routes(samples, twins, bf16=True)),
            r"rounding \(another precision",
            wrong=("name expert", "prefers", "avoids"),
        ),
        # The model.
        case("layer 3 without residual", changed(drop_attention_residual), LAYER_3, wrong=(ROUNDING, REPEATED)),
        case("layer 4 has layer 5's router", changed(copy_router), LAYER_4, wrong=(ROUNDING, "captured wrongly, ids")),
        case(
            "layer 4: two biases", lambda: (biased, routes(samples, two_biases, **BIASED)), "expert [59] of layer 4 was"
        ),
        case(
            "biases of all layers",
            lambda: (biased, routes(samples, every_bias, **BIASED)),
            "fact: an expert of each of layers",
            "biases or rows of these routers",
            wrong=("fact:.*fact:.*fact:",),
        ),
        case(
            "groups of experts",
            changed(moe_router_num_groups=4, moe_router_group_topk=2),
            "config",
            EMBEDDING,
            open=True,
        ),
        case(
            "softmax before the top-k", changed(moe_router_pre_softmax=True), "or after every layer", "of their scores"
        ),
        case(
            "hidden dropout of 1 %", changed(hidden_dropout=0.01), "That fits weights.*random mask.*rounding", open=True
        ),
        case("token 0", changed(redraw_token_0), "token 0 differ .*its embedding", wrong=(FIRST_ROW,)),
        case("half under other weights", half(drift(0.1)), "fits weights", open=True, wrong=confident),
        case("half in bf16", half(bf16=True), r"rounding \(another precision", open=True, wrong=("fact:",)),
        # The recording.
        case(
            "samples late by 1 to 3",
            in_samples(late_by_1_to_3),
            r"\(1 row .*\(2 rows .*\(3 rows ",
            wrong=("fact:.*" * 4,),
        ),
        case(
            "16 rows of filler in each sample",
            in_samples(fill_16_rows),
            "192 rows of .* repeat one",
            wrong=(UNRELATED,),
        ),
        case(
            "filler in every fourth row", edited(fill_every_fourth), "185 rows of samples 0..11 of b repeat one route"
        ),
        case(
            "sample 6 in reverse",
            in_samples(reverse_a_sample),
            "sample 6",
            "these are routes of other rows",
            wrong=(ROUTER,),
        ),
        case(
            "samples shuffled after the first row",
            in_samples(shuffle_but_first),
            "rows after it have a different order",
        ),
        case("CP's chunks", in_samples(zigzag), PLACES, "chunks in a different order"),
        case("even rows before odd rows", edited(even_before_odd), UNRELATED, "rows in a different order"),
        case("a tenth of all decisions", edited(rot), CAPTURED, open=True, wrong=confident),
        case("a fifth of layer 4", edited(rot_layer_4), "layer 4 alone differs", CAPTURED),
        case("layer 4", in_layer(3, partial(random_routes, seed=6)), "layer 4 alone differs", CAPTURED),
        case(
            "the last expert of the row before",
            edited(last_expert_of_the_row_before),
            CAPTURED,
            open=True,
            wrong=confident,
        ),
        case("rows of a token", edited(rows_of_a_token), f"token {token_of_22_rows} differ .*captured wrongly"),
    ]


if __name__ == "__main__":
    print_cases(rare_cases)
