"""SkyRL: `import megatron_router_replay.trainers.skyrl` in the driver's process and in those of its Megatron workers.

SkyRL's own replay gets no routes. Whether micro-batches have routes stays the switch, and the samples come in with them. The
driver adds the id of each row's token to the routes, as more layers, so that SkyRL's padding of routes is compared with its
padding of tokens. Megatron-Core is not imported before SkyRL imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_router_replay.errors import PayloadError
from megatron_router_replay.trainers import token_layers
from megatron_router_replay.trainers.seams import Seam, hook, take, when_imported

FIELD = "rollout_expert_indices"
WORKERS = "skyrl.backends.skyrl_train"
DRIVER = Seam(
    module="skyrl.train.trainer",
    name="RayPPOTrainer.convert_to_training_input",
    parameters="self generator_output",
    words=f"prompt_token_ids response_ids loss_masks {FIELD}",
)
PASSES = tuple(
    Seam(
        module=f"{WORKERS}.workers.megatron.megatron_model_wrapper",
        name=f"MegatronModelWrapper.{name}",
        parameters="self micro_batches",
        words=f"sequences attention_mask {FIELD} get_forward_backward_func",
    )
    for name in ("forward", "forward_backward_mini_batch")
)
LAYOUTS = tuple(
    Seam(module=f"{WORKERS}.distributed.megatron.megatron_utils", name=name, parameters="input_ids pre_process")
    for name in ("preprocess_packed_seqs", "remove_left_padding")
)
SEAMS = (DRIVER, *PASSES, *LAYOUTS)

_replays = False  # the pass that runs now


def install(**options: Any) -> None:
    """Install the driver's hook, and the workers' once their module is imported. Importing this module calls it.

    Args:
        options: of `mrr.replay`.
    """
    hook(DRIVER, _driving)
    when_imported(PASSES[0].module, lambda module: _install(options))


def _driving(original: Any) -> Any:
    def convert_to_training_input(self: Any, generator_output: Any, *args: Any, **kwargs: Any) -> Any:
        if generator_output.get(FIELD) is not None:
            generator_output = {**generator_output, FIELD: _with_tokens(generator_output)}
        return original(self, generator_output, *args, **kwargs)

    return convert_to_training_input


def _install(options: dict[str, Any]) -> None:
    from megatron_router_replay.trainers import follow

    # SkyRL pads with 0 where it lays a micro-batch out.
    replay = follow.install("SkyRL", lambda: _replays, {"padding_token_ids": [0], **options})

    def passing(original: Any) -> Any:
        def run(self: Any, micro_batches: Any, *args: Any, **kwargs: Any) -> Any:
            global _replays
            batches = micro_batches
            replays = any(batch.get(FIELD) is not None for batch in batches)
            if replays:
                follow.active().enter(self.actor_module, lambda: _samples(batches))
                # SkyRL's own replay gets no routes; under an audit it gets them as it knows them, without ids.
                own = token_layers.without if replay.audits else lambda values: None
                micro_batches = [{**batch, FIELD: own(batch[FIELD])} for batch in batches]
            _replays = replays
            try:
                results = original(self, micro_batches, *args, **kwargs)
            finally:
                _replays = False
            if replays and isinstance(results, list):
                follow.report(results)  # SkyRL takes the mean
            return results

        return run

    def laying_out(original: Any) -> Any:
        def lay_out(input_ids: Any, *args: Any, pre_process: bool = True, **kwargs: Any) -> Any:
            # Later pipeline stages need tokens for nothing else: these say which rows the stage needs.
            return original(input_ids, *args, pre_process=pre_process or _replays, **kwargs)

        return lay_out

    for seam in PASSES:
        hook(seam, passing)
    for seam in LAYOUTS:
        hook(seam, laying_out)


def _with_tokens(generator_output: Any) -> list[Any]:
    """Return each sample's routes [rows, layers, topk] with the ids of their tokens, arrays or lists as they came.

    Raises:
        PayloadError: a sample has fewer rows than its trained tokens depend on.
    """
    fields = take(DRIVER, generator_output, "prompt_token_ids", "response_ids", "loss_masks", FIELD)
    with_tokens = []
    for i, (prompt, response, loss_mask, rows) in enumerate(zip(*fields, strict=True)):
        ids, values = torch.as_tensor([*prompt, *response]), torch.as_tensor(np.asarray(rows))
        trained = [len(prompt) + at for at, each in enumerate(loss_mask) if each]
        # The engine did not run its last token, and SkyRL may have appended and trained an EOS after it.
        if trained and len(values) < trained[-1] - 1:
            raise PayloadError(
                f"MRR802: sample {i} has {len(values)} rows of routes, and its last trained token is at position "
                f"{trained[-1]} of {len(ids)}: the engine's rows were lost."
            )
        values = token_layers.add(values, ids, sample=i)
        with_tokens.append(values.tolist() if isinstance(rows, list) else values.numpy())
    return with_tokens


def _samples(micro_batches: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return tokens [T] and routes [T, layers, topk] of each sample, -1 where SkyRL filled."""
    tokens: list[Tensor] = []
    routes: list[Tensor] = []
    for batch in micro_batches:
        ids, mask, experts = take(PASSES[0], batch, "sequences", "attention_mask", FIELD)
        for row, real, rows in zip(ids.cpu(), mask.cpu().bool(), experts.cpu()):
            # SkyRL fills a micro-batch up with rows of a single token that has no route: they are padding.
            if int(real.sum()) > 1:
                tokens.append(row[real])
                routes.append(token_layers.remove(rows[real], row[real], sample=len(routes)))
    return tokens, routes


install()
