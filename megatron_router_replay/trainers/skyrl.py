"""SkyRL: `import megatron_router_replay.trainers.skyrl` in the driver's process and in those of its Megatron workers.

SkyRL's own replay gets no routes. Whether micro-batches have routes stays the switch, and the samples come in with them. The
driver adds the id of each row's token to the routes, as more layers, so that SkyRL's padding of routes is compared with its
padding of tokens. Megatron-Core is not imported before SkyRL imports it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.errors import PayloadError
from megatron_router_replay.trainers import replayer, token_layers
from megatron_router_replay.trainers.seams import Seam, bind, hook, take, when_imported

FIELD = "rollout_expert_indices"
WORKERS = "skyrl.backends.skyrl_train"
DRIVER = Seam(
    "skyrl.train.trainer",
    "RayPPOTrainer.convert_to_training_input",
    "self generator_output",
    words=f"prompt_token_ids response_ids loss_masks {FIELD}",
)
FORWARD, TRAINING = (
    Seam(
        f"{WORKERS}.workers.megatron.megatron_model_wrapper",
        f"MegatronModelWrapper.{name}",
        "self micro_batches",
        words=f"sequences attention_mask {FIELD} get_forward_backward_func {others}",
    )
    for name, others in (("forward", ""), ("forward_backward_mini_batch", "loss_mask"))
)
LAYOUTS = tuple(
    Seam(f"{WORKERS}.distributed.megatron.megatron_utils", name, "input_ids pre_process")
    for name in ("preprocess_packed_seqs", "remove_left_padding")
)
SEAMS = (DRIVER, FORWARD, TRAINING, *LAYOUTS)


def install(**options: Any) -> None:
    """Install the hooks as soon as their modules are imported. Importing this module calls it.

    Args:
        options: of `mrr.replay`.
    """
    hook(DRIVER, _convert)
    # SkyRL pads with 0 where it lays a micro-batch out.
    options = {"padding_token_ids": [0], **options}
    when_imported(FORWARD.module, lambda module: replayer.install("SkyRL", None, options))
    hook(FORWARD, _run_forward)
    hook(TRAINING, _run_training)
    for seam in LAYOUTS:
        hook(seam, replayer.give_every_stage_tokens)


# ---- the driver
def _convert(original: Any, *args: Any, **kwargs: Any) -> Any:
    call = bind(original, *args, **kwargs)
    output = call.arguments["generator_output"]
    if output.get(FIELD) is not None:
        tokenizer = getattr(call.arguments["self"], "tokenizer", None)
        routes = _with_tokens(output, getattr(tokenizer, "eos_token_id", None))
        call.arguments["generator_output"] = {**output, FIELD: routes}
    return original(*call.args, **call.kwargs)


def _with_tokens(generator_output: Any, eos_token_id: int | None) -> list[Any]:
    """Return each sample's routes [rows, layers, topk] with the ids of their tokens, arrays or lists as they came."""
    fields = take(DRIVER, generator_output, "prompt_token_ids", "response_ids", "loss_masks", FIELD)
    with_tokens = []
    for i, (prompt, response, loss_mask, rows) in enumerate(zip(*fields, strict=True)):
        if rows is None:
            raise PayloadError(
                f"MRR802: sample {i} has {len(prompt) + len(response)} tokens, and no routes while others have: it was not "
                "generated. Drop it from the batch."
            )
        ids, values = torch.as_tensor([*prompt, *response]), torch.as_tensor(np.asarray(rows))
        last_trained = max((at for at, is_trained in enumerate(loss_mask, len(prompt)) if is_trained), default=0)
        # The engine did not run its last token, and SkyRL may have appended and trained an EOS after it.
        is_appended = last_trained == len(ids) - 1 and int(ids[-1]) == eos_token_id
        values = token_layers.add(values, ids, sample=i, at_least=last_trained - is_appended)
        with_tokens.append(values.tolist() if isinstance(rows, list) else values.numpy())
    return with_tokens


# ---- the workers
def _run_forward(original: Any, *args: Any, **kwargs: Any) -> Any:
    return _run_pass(bind(original, *args, **kwargs), original, trains=False)


def _run_training(original: Any, *args: Any, **kwargs: Any) -> Any:
    return _run_pass(bind(original, *args, **kwargs), original, trains=True)


def _run_pass(call: inspect.BoundArguments, original: Any, *, trains: bool) -> Any:
    """Run a pass of SkyRL's wrapper, whose micro-batches have routes if it replays."""
    self, micro_batches = call.arguments["self"], call.arguments["micro_batches"]
    if all(batch.get(FIELD) is None for batch in micro_batches):
        return original(*call.args, **call.kwargs)
    replay = replayer.active()
    replay.enter(self.actor_module, lambda: _samples(micro_batches, trains=trains))
    # SkyRL's own replay gets no routes; under an audit it gets them as it has them, without ids.
    own = token_layers.without if replay.audits else lambda values: None
    call.arguments["micro_batches"] = [{**batch, FIELD: own(batch[FIELD])} for batch in micro_batches]
    with replay.in_pass("replay"):
        results = original(*call.args, **call.kwargs)
    if isinstance(results, list):
        replay.add_metrics(results)  # SkyRL takes the mean
    return results


def _samples(micro_batches: Sequence[Any], *, trains: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Return tokens [T] and routes [T, layers, topk] of each sample, -1 where SkyRL filled."""
    tokens: list[Tensor] = []
    routes: list[Tensor] = []
    padding: list[tuple[Tensor, Tensor]] = []
    for batch in micro_batches:
        ids, mask, experts = take(FORWARD, batch, "sequences", "attention_mask", FIELD)
        # Passes for log-probs have no loss mask; what lost its routes there raises in the pass that trains.
        (loss_mask,) = take(TRAINING, batch, "loss_mask") if trains else (None,)
        for i, (row, real, rows) in enumerate(zip(ids.cpu(), mask.cpu().bool(), experts.cpu())):
            own, values = row[real], rows[real]
            is_trained = trains and (loss_mask is None or bool(loss_mask[i].any()))
            if _is_padding(values) and not is_trained:
                padding.append((own, token_layers.without(values).to(torch.int16).fill_(-1)))
            else:
                tokens.append(own)
                routes.append(token_layers.remove(values, own, sample=len(routes)))
    # A sample that begins with the same tokens has routes for them; a token 0 is padding in any batch.
    for own, values in padding:
        if bool(own.any()) and not any(torch.equal(part[: len(own)], own) for part in tokens):
            tokens.append(own)
            routes.append(values)
    return tokens, routes


def _is_padding(values: Tensor) -> bool:
    """Return whether SkyRL made a row to fill a batch up: of a single token, or a copy of a sample with filler alone."""
    return len(values) == 1 or bool((values == torch.arange(values.shape[2])).all())


install()
