"""Faults in a small model, its config or its recording, and what `diff_traces` says of each beside the truth.

    python -m tests.functional.diagnostics.model_faults            # a line for each fault
    python -m tests.functional.diagnostics.model_faults --texts    # and the whole text of each diff

A fault is a function that returns two traces. Megatron-Core's GPTModel routes 740 rows of twelve samples in six layers to
4 of 32 experts; the second trace comes from a model that differs in one thing. The diff gets nothing but the traces.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import megatron_router_replay as mrr
from tests.functional.diagnostics.small_model import (
    BIASED,
    Change,
    add_bias,
    add_router_noise,
    change_one_element,
    in_order,
    lose_experts,
    move_experts_too,
    move_router_rows,
    random_samples,
    rare_token,
    record_routes,
    redraw_a_tensor,
    redraw_an_embedding,
    redraw_an_expert,
    round_routers,
    scale_embeddings,
    scale_logits,
    scale_weights,
    swap_gate_and_up,
    swap_layers,
    swap_two_experts,
    without_ids,
)

GROUP_SHARES = (0.0, 0.2, 0.3, 0.6)
Traces = tuple[mrr.RoutingTrace, mrr.RoutingTrace]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Two traces, the truth about them, and how the text of their diff is judged.

    Args:
        right: patterns that a text which names the truth has, all of them.
        open: the text may say that several causes fit, and not which.
        wrong: patterns of confident claims that are not true.
    """

    name: str
    truth: str
    make: Callable[[], Traces]
    right: tuple[str, ...]
    open: bool = False
    wrong: tuple[str, ...] = ()

    def judge(self, text: str) -> str:
        """Return "right", "open" or "WRONG"."""
        text = re.sub(r"\s+", " ", text)
        if any(re.search(pattern, text, re.IGNORECASE) for pattern in self.wrong):
            return "WRONG"
        if all(re.search(pattern, text, re.IGNORECASE) for pattern in self.right):
            return "right"
        return "open" if self.open and re.search(OPEN, text) else "WRONG"


OPEN = r"routes alone do not say which"
ROUNDING = r"looks like rounding"  # of a fault
ROUTER = r"weights, or this router"
UNRELATED = r"as unlike .* as unrelated"
OTHER_TOKENS = r"other tokens in these rows"
WEIGHTS_OR_PRECISION = r"weights or a config that differ a little"
LAYER_3 = r"between layer 2 and layer 3"
LAYER_4 = r"between layer 3 and layer 4"
EMBEDDING = r"between the embedding and layer 1"


def model_cases(seed: int = 0, **sizes: Any) -> list[Case]:
    """Return the faults in a model of these sizes, with weights and tokens of this seed."""
    samples = random_samples(seed=seed)
    routes = partial(record_routes, seed=1234 + seed, **sizes)
    token = rare_token(samples)
    base: dict[str, mrr.RoutingTrace] = {}

    def plain() -> mrr.RoutingTrace:
        return base.setdefault("plain", routes(samples) if "plain" not in base else base["plain"])

    def biased() -> mrr.RoutingTrace:
        return base.setdefault("biased", routes(samples, **BIASED) if "biased" not in base else base["biased"])

    def changed(change: Change | None = None, **options: Any) -> Callable[[], Traces]:
        return lambda: (plain(), routes(samples, change, **options))

    def bias(value: float, bf16: bool = False) -> Callable[[], Traces]:
        return lambda: (biased(), routes(samples, add_bias(value), bf16=bf16, **BIASED))

    def edited(edit: Callable[[mrr.RoutingTrace], mrr.RoutingTrace], keep_ids: bool = True) -> Callable[[], Traces]:
        return lambda: (
            plain() if keep_ids else without_ids(plain()),
            edit(plain() if keep_ids else without_ids(plain())),
        )

    order = (4, 0, 2, 1, 3, 5, 11, 6, 7, 10, 8, 9)

    def late(trace: mrr.RoutingTrace) -> mrr.RoutingTrace:
        return trace._with(topk_indices=trace.topk_indices.roll(1, 0))

    def late_in_a_sample(trace: mrr.RoutingTrace) -> mrr.RoutingTrace:
        ids = trace.topk_indices.clone()
        ids[267:322] = torch.cat([ids[267:268], ids[267:321]])
        return trace._with(topk_indices=ids)

    def columns(trace: mrr.RoutingTrace) -> mrr.RoutingTrace:
        return trace._with(topk_indices=trace.topk_indices[:, [0, 1, 4, 3, 2, 5]])

    def longer(trace: mrr.RoutingTrace) -> mrr.RoutingTrace:
        parts = list(trace.samples())
        parts[4] = parts[4].gather_rows(slice(0, 48)).with_samples((48,))
        return mrr.concat_traces(parts)

    def more_tokens() -> Traces:
        extended = [*samples[:4], torch.cat([samples[4], samples[5][:9]]), *samples[5:]]
        return without_ids(plain()), without_ids(routes(extended))

    def other_answers() -> Traces:
        other = random_samples(seed=5)
        return plain(), routes([torch.cat([one[:20], new[20:]]) for one, new in zip(samples, other)])

    def recut(parts: list[Tensor]) -> Traces:
        """Return the routes of samples that the attention saw in these parts."""
        return plain(), routes(parts)._with(sequence_lengths=tuple(map(len, samples)))

    little, precision = WEIGHTS_OR_PRECISION, r"another precision"
    gained = "expert 3 of layer 3 was gained in"
    lost = "expert 3 of layer 3 was lost in"
    return [
        Case(name="control", truth="the same", make=changed(), right=("the traces are the same",)),
        Case(
            name="order of samples",
            truth="samples in another order, matched by ids; the same",
            make=edited(lambda trace: in_order(trace, order)),
            right=("matched by their tokens", "traces are the same"),
        ),
        Case(
            name="order of samples, no ids",
            truth="samples in another order",
            right=(r"match samples 4, 0\.\.1, 3, 11",),
            make=edited(lambda trace: in_order(trace, order), keep_ids=False),
            wrong=(UNRELATED, ROUTER),
        ),
        Case(
            name="four of twelve samples",
            truth="b has four samples; the same in these",
            make=edited(lambda trace: in_order(trace, (1, 4, 7, 10))),
            right=("have no equal in b", "what both cover is the same"),
        ),
        Case(
            name="a sample lost, no ids",
            truth="sample 5 is not in b",
            wrong=(UNRELATED, ROUTER),
            make=edited(lambda trace: in_order(trace, [i for i in range(12) if i != 5]), keep_ids=False),
            right=("samples 5..10 of b match samples 6..11",),
        ),
        Case(
            name="a sample cut, no ids",
            truth="sample 4 has 48 of its 55 rows; the same in these",
            make=edited(longer, keep_ids=False),
            right=("sample 4", r"55\b.*\b48\b"),
            wrong=(UNRELATED, ROUTER),
        ),
        Case(
            name="a sample longer, no ids",
            truth="sample 4 has 64 rows for 55; the same in these",
            make=more_tokens,
            right=("sample 4", r"55\b.*\b64\b"),
            wrong=(UNRELATED, ROUTER),
        ),
        Case(
            name="other answers",
            truth="same prompts of 20 rows, other answers; the same weights",
            make=other_answers,
            right=("different token", "rows before agree in every layer"),
            wrong=(UNRELATED, ROUTER),
        ),
        Case(
            name="rows one late",
            truth="rows one late",
            make=edited(late),
            right=(r"\(1 row earlier\)",),
            wrong=(UNRELATED, ROUTER),
        ),
        Case(
            name="rows of a sample late",
            truth="rows of sample 4 one late",
            make=edited(late_in_a_sample),
            right=("sample 4", r"\(1 row earlier\)"),
            wrong=(UNRELATED, ROUTER),
        ),
        Case(
            name="columns swapped",
            truth="layers 3 and 5 have each other's routes",
            make=edited(columns),
            right=("layers 3, 5 of b match layers 5, 3 of a",),
            wrong=(UNRELATED, ROUTER),
        ),
        Case(
            name="ids plus 8",
            truth="every expert under its id plus 8",
            right=("its id plus 8",),
            wrong=(ROUTER,),
            make=edited(lambda trace: trace._with(topk_indices=(trace.topk_indices + 8) % trace.num_experts)),
        ),
        Case(
            name="router rows moved",
            truth="layer 3's router rows by 8, not its experts",
            make=changed(move_router_rows),
            right=("its id plus 8", "later layers differ"),
        ),
        Case(
            name="router rows and experts moved",
            truth="a layer's experts renumbered; the same model",
            make=changed(move_experts_too),
            right=("its id plus 8", "later layers agree"),
            wrong=("later layers differ",),
        ),
        Case(
            name="layers swapped",
            truth="weights of layers 3 and 5 swapped",
            make=changed(swap_layers),
            right=(LAYER_3,),
            wrong=(ROUNDING, ROUTER),
        ),
        Case(
            name="gate and up swapped",
            truth="experts of layer 3",
            make=changed(swap_gate_and_up),
            right=(LAYER_4,),
            wrong=(ROUNDING, ROUTER),
        ),
        Case(
            name="two experts swapped",
            truth="experts 3 and 5 of layer 3",
            make=changed(swap_two_experts),
            right=(LAYER_4,),
            wrong=(ROUNDING, ROUTER),
        ),
        Case(
            name="one element",
            truth="one weight of layer 3's attention",
            make=changed(change_one_element),
            right=(LAYER_3,),
            wrong=(ROUNDING, ROUTER),
        ),
        Case(
            name="one tensor",
            truth="layer 3's attention",
            make=changed(redraw_a_tensor),
            right=(LAYER_3,),
            wrong=(ROUNDING, ROUTER),
        ),
        Case(
            name="one expert",
            truth="expert 3 of layer 3",
            make=changed(redraw_an_expert),
            right=(LAYER_4,),
            wrong=(ROUNDING, ROUTER),
        ),
        Case(
            name="one embedding row",
            truth=f"token {token}, which two rows hold",
            make=changed(redraw_an_embedding(token)),
            right=(rf"token {token}\b",),
            open=True,
            wrong=(ROUNDING, ROUTER),
        ),
        Case(
            name="router noise",
            truth="noise in layer 3's logits",
            make=changed(add_router_noise),
            right=(LAYER_3,),
            wrong=(ROUNDING, ROUTER),
        ),
        Case(
            name="dropout",
            truth="dropout of hidden states",
            make=changed(hidden_dropout=0.1),
            right=(EMBEDDING, "random"),
            wrong=(ROUNDING, ROUTER),
        ),
        Case(
            name="RoPE",
            truth="interleaved rotary embedding",
            make=changed(rotary_interleaved=True),
            right=(EMBEDDING, "positions"),
            wrong=(ROUNDING, ROUTER),
        ),
        Case(
            name="temperature",
            truth="logits of all routers by 0.7, which changes the experts' weights",
            make=changed(scale_logits),
            right=("or after every layer", "of their scores"),
            wrong=(ROUNDING, ROUTER),
        ),
        Case(
            name="experts lost",
            truth="experts 8 to 15 of all layers, as those of a rank, return 0",
            make=changed(lose_experts),
            right=("or after every layer", "experts of layer 1"),
            wrong=(ROUNDING, ROUTER),
        ),
        Case(
            name="attention over samples",
            truth="a packed row without cu_seqlens",
            make=lambda: recut([torch.cat(samples)]),
            right=(EMBEDDING, "packing"),
            wrong=(ROUNDING, OTHER_TOKENS),
        ),
        Case(
            name="context lost",
            truth="rows from position 32 on see nothing before it",
            make=lambda: recut([part for each in samples for part in (each[:32], each[32:])]),
            right=(EMBEDDING, "mask"),
            wrong=(ROUNDING, OTHER_TOKENS),
        ),
        Case(
            name="epsilon",
            truth="layernorm_epsilon 1e-2 for 1e-6",
            make=changed(layernorm_epsilon=1e-2),
            right=("config",),
            open=True,
            wrong=(ROUNDING, ROUTER),
        ),
        *(
            Case(
                name=f"bias {value:+}{', bf16' if bf16 else ''}",
                make=bias(value, bf16),
                right=(gained if value > 0 else lost,),
                truth=f"expert 3 of layer 3 has a bias of {value:+}{'; bf16' if bf16 else ''}",
                wrong=(ROUNDING,),
                open=value == 0.05,
            )
            for bf16 in (False, True)
            for value in (5.0, 0.05, -5.0)
        ),
        Case(
            name="weights 1 %",
            truth="all weights +-1 %",
            make=changed(scale_weights),
            right=(little,),
            open=True,
            wrong=(ROUNDING, ROUTER),
        ),
        Case(
            name="embeddings 1 %",
            truth="embeddings +-1 %",
            make=changed(scale_embeddings),
            right=(little,),
            open=True,
            wrong=(ROUNDING, ROUTER),
        ),
        Case(
            name="bf16 model",
            truth="weights and activations in bf16",
            make=changed(bf16=True),
            right=(precision,),
            open=True,
            wrong=(UNRELATED, ROUTER),
        ),
        Case(
            name="bf16 router",
            truth="logits rounded to bf16",
            make=changed(round_routers),
            right=(precision,),
            open=True,
            wrong=(UNRELATED, ROUTER),
        ),
    ]


def group_samples(prompt_share: float, seed: int = 0) -> list[Tensor]:
    """Return four answers to each of four prompts, of 64 to 74 tokens; the prompts depend on no seed."""
    prompt_length, samples = round(64 * prompt_share), []
    for prompt in range(4):
        (begin,) = random_samples([prompt_length], seed=1000 + prompt) if prompt_length else [torch.zeros(0).long()]
        for answer in range(4):
            length = 64 - prompt_length + (7 * answer + 3 * prompt) % 11
            samples.append(torch.cat([begin, *random_samples([length], seed=100 * seed + 4 * prompt + answer)]))
    return samples


def late_in_samples(trace: mrr.RoutingTrace) -> mrr.RoutingTrace:
    rows = [torch.cat([sample.topk_indices[:1], sample.topk_indices[:-1]]) for sample in trace.samples()]
    return trace._with(topk_indices=torch.cat(rows))


def group_cases(prompt_share: float, keep_ids: bool) -> list[Case]:
    """Return faults in a batch of GRPO groups: answers that share this part of their prompt."""
    keep = (lambda trace: trace) if keep_ids else without_ids
    samples = group_samples(prompt_share)
    a, in_bf16, other = (
        record_routes(samples),
        record_routes(samples, bf16=True),
        record_routes(group_samples(prompt_share, seed=9)),
    )
    siblings = in_order(a, [*range(5), 6, 5, *range(7, 16)])
    other_answers = "hold different tokens" if keep_ids else "rows are as unlike as unrelated"
    cases = [
        ("bf16", in_bf16, "bf16", (r"rounding \(another precision",), ("fact:",)),
        (
            "rows late",
            late_in_samples(a),
            "all rows of each sample one late",
            (r"\(1 row earlier\)",),
            ("fact:.*fact:", ROUTER),
        ),
        (
            "rows late, bf16",
            late_in_samples(in_bf16),
            "the same in bf16",
            (r"\(1 row earlier\)",),
            ("fact:.*fact:", ROUTER),
        ),
        (
            "siblings swapped",
            siblings,
            "samples 5 and 6 swapped",
            ("traces are the same",) if keep_ids else ("samples 5 and 6 of b changed places",),
            (ROUTER,),
        ),
        ("other answers", other, "other answers to the same prompts", (other_answers,), ("fact:.*fact:", ROUTER)),
    ]
    return [
        Case(name=name, truth=truth, make=lambda b=b: (keep(a), keep(b)), right=right, wrong=wrong)
        for name, b, truth, right, wrong in cases
    ]


def print_cases(make: Callable[[], list[Case]]) -> None:
    """Print what the diff says of each case beside the truth."""
    from tests.support.one_rank import only_rank

    with only_rank():
        for case in make():
            diff = mrr.diff_traces(*case.make())
            print(f"{case.judge(str(diff)):6} {case.name}: {case.truth}", flush=True)
            if "--texts" in sys.argv:
                print("       " + str(diff).replace("\n", "\n       ") + "\n", flush=True)


def all_cases() -> list[Case]:
    groups = [case for share in GROUP_SHARES for ids in (True, False) for case in group_cases(share, ids)]
    return [*model_cases(), *groups]


if __name__ == "__main__":
    print_cases(all_cases)
