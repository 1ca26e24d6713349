"""Batches as verl's trainer makes them: left-padded prompts, right-padded responses, routes with zeros where there are none.

Every token of a batch is another one, so that a token says which sample and position it is, and what its routes are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import modeling_flash_attention_utils as utils
from verl.utils import attention_utils
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding

from megatron_router_replay.trainers import token_layers

VOCAB_SIZE = 512

if not hasattr(attention_utils, "_fallback_unpad_input"):
    # Before August 2026 verl took these from flash_attn, which a CPU has not; transformers has them in plain torch.
    plain = (lambda values, at: values[at], utils._pad_input, None, utils._unpad_input)
    attention_utils._get_attention_functions = lambda: plain


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a data-parallel rank's batch."""

    prompts: tuple[int, ...] = (3, 6, 5, 2, 7, 4, 3, 5)
    responses: tuple[int, ...] = (9, 5, 7, 12, 3, 8, 6, 11)
    num_columns: int = 4
    topk: int = 2
    num_experts: int = 8

    @property
    def lengths(self) -> list[int]:
        return [prompt + response for prompt, response in zip(self.prompts, self.responses)]


SIZES = Sizes()
LENGTHS = SIZES.lengths


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Args:
    tokens: of each sample, [T].
    routes: token -> [columns, topk] that it must be routed to, for tokens that have routes.
    padded: the fields of verl's trainer, before it takes the padding out.
    """

    tokens: list[Tensor]
    routes: dict[int, Tensor]
    padded: dict[str, Tensor]


def make_batch(
    seed: int = 0, sizes: Sizes = SIZES, engine: Callable[[list[Tensor]], list[Tensor]] | None = None
) -> Batch:
    """Random tokens and routes; the last token of each sample has none, as verl gets them from an engine.

    Args:
        engine: returns the routes of the samples, in place of random ones; tokens repeat then.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = sizes.lengths
    ids = torch.randperm(VOCAB_SIZE - 1, generator=generator)[: sum(lengths)] + 1
    ids = ids if engine is None else torch.randint(1, VOCAB_SIZE, (sum(lengths),), generator=generator)
    tokens = list(ids.split(lengths))
    shape = (sum(lengths), sizes.num_columns, sizes.num_experts)
    routes = torch.rand(shape, generator=generator).argsort(dim=2)[:, :, : sizes.topk].short()
    longest_prompt, longest_response = max(sizes.prompts), max(sizes.responses)
    num, width = len(lengths), longest_prompt + longest_response
    widths = {"input_ids": width, "attention_mask": width, "prompts": longest_prompt}
    widths |= {"responses": longest_response, "response_mask": longest_response}
    padded = {name: torch.zeros(num, size, dtype=torch.int64) for name, size in widths.items()}
    padded["routed_experts"] = torch.zeros(num, width, sizes.num_columns + 2, sizes.topk, dtype=torch.int16)
    rows = [part[:-1] for part in routes.split(lengths)] if engine is None else engine(tokens)
    samples = zip(sizes.prompts, sizes.responses, tokens, rows)
    for i, (prompt, response, of_sample, its_routes) in enumerate(samples):
        whole = slice(longest_prompt - prompt, longest_prompt + response)
        padded["input_ids"][i, whole] = of_sample
        padded["attention_mask"][i, whole] = 1
        padded["prompts"][i, longest_prompt - prompt :] = of_sample[:prompt]
        padded["responses"][i, :response] = of_sample[prompt:]
        padded["response_mask"][i, :response] = 1
        # As the plug-in's hook in the agent loop does: all tokens of a response are trained.
        values = token_layers.add(its_routes, of_sample, sample=i, at_least=len(of_sample) - 1)
        padded["routed_experts"][i, whole.start : whole.start + len(values)] = values
    padded["position_ids"] = (padded["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
    padded["old_log_probs"] = -torch.rand(padded["response_mask"].shape, generator=generator)
    padded["advantages"] = torch.randn(padded["response_mask"].shape, generator=generator)
    last = {int(of_sample[-1]) for of_sample in tokens}
    return Batch(
        tokens=tokens,
        routes={int(token): route for token, route in zip(ids, routes) if int(token) not in last},
        padded=padded,
    )


def as_verl(padded: dict[str, Tensor], **settings: Any) -> TensorDict:
    """Return a batch as verl's worker gets it: without padding, and with the settings of its trainer and worker."""
    data = TensorDict({name: values.clone() for name, values in padded.items()}, batch_size=len(padded["input_ids"]))
    data = left_right_2_no_padding(data)
    tu.assign_non_tensor(data, temperature=1.0, global_batch_size=len(padded["input_ids"]), **settings)
    return data
