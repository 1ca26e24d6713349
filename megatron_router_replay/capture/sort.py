"""Steps off the log -> the rows of each request; what does not add up is left out and named."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron_router_replay.capture.buffer import CALL, MASKED, UNSEEN
from megatron_router_replay.capture.errors import CaptureError
from megatron_router_replay.capture.steps import StepPart, StepPlan

IntArray = NDArray[np.int64]


class LoggedStep(NamedTuple):
    """What is known about one step of the log.

    Args:
        plan: whose tokens it holds.
        offset: steps of this plan before it; each is one token further.
        noted: which layers' routes eager routers handed over; None: all. Compiled code stamped the others.
        knows_tokens: whether the model's input_ids were seen.
    """

    plan: StepPlan
    offset: int
    noted: tuple[bool, ...] | None
    knows_tokens: bool


class StepSorter:
    """Writes the steps of a log to their requests.

    Args:
        layer_numbers: of axis 1 of the routes.
        num_experts: ids outside 0..num_experts - 1 are refused.
        dtype: of the requests' rows.
    """

    def __init__(self, layer_numbers: Sequence[int], *, num_experts: int, dtype: np.dtype[Any]) -> None:
        self._layer_numbers = np.asarray(layer_numbers)
        self._num_experts = num_experts
        self._dtype = dtype

    def sort(
        self, steps: Sequence[LoggedStep], routes: IntArray, stamps: IntArray, token_ids: IntArray
    ) -> list[CaptureError]:
        """Write every step that adds up; return an error for each one, or part of one, that does not.

        Args:
            steps: T of them.
            routes: [T, num_layers, num_tokens, topk].
            stamps: [T, num_layers].
            token_ids: [T, num_tokens].
        """
        errors = []
        bad_steps = set()
        for index, step in enumerate(steps):
            error = self._check_stamps(step, stamps[index])
            if error is not None:
                bad_steps.add(index)
                errors.append(error)
        unseen = [index for index, step in enumerate(steps) if not step.knows_tokens]
        tokens = token_ids.astype(np.int32)
        tokens[unseen] = UNSEEN
        has_strangers = bool(routes.size) and not 0 <= routes.min() <= routes.max() < self._num_experts
        is_suspect = has_strangers or bool((tokens == MASKED).any())
        for (_, is_bad), group in groupby(
            range(len(steps)), key=lambda index: (id(steps[index].plan), index in bad_steps)
        ):
            if is_bad:
                continue
            indices = list(group)
            first, end = indices[0], indices[-1] + 1
            step = steps[first]
            if step.plan.is_decode:
                # By request first, so that each one's rows lie side by side: [num_tokens, T, num_layers, topk].
                own_routes, own_tokens = (
                    routes[first:end].transpose(2, 0, 1, 3),
                    np.ascontiguousarray(tokens[first:end].T),
                )
            else:
                own_routes, own_tokens = routes[first].transpose(1, 0, 2), tokens[first]
            rows = np.ascontiguousarray(own_routes, self._dtype)
            for part in step.plan.parts:
                if part.request.is_dropped:
                    continue
                slots = part.slots.start if step.plan.is_decode else part.slots
                position = part.position + step.offset
                if is_suspect:
                    error = self._check_part(part, position, own_routes[slots], own_tokens[slots])
                    if error is not None:
                        errors.append(error)
                        continue
                part.request.write(position, rows[slots], own_tokens[slots])
        return errors

    def _check_stamps(self, step: LoggedStep, stamps: IntArray) -> CaptureError | None:
        """Compare how often compiled code ran each layer, and on how many rows, with what was announced."""
        num_tokens = step.plan.num_tokens
        expected = 0 if step.noted is None else np.where(step.noted, 0, CALL + num_tokens)
        wrong = np.flatnonzero(stamps != expected)
        if not wrong.size or all(part.request.is_dropped for part in step.plan.parts):
            return None
        requests = [part.request.request_id for part in step.plan.parts]
        layers = self._layer_numbers[wrong].tolist()
        calls, num_rows = divmod(int(stamps[wrong[0]]), CALL)
        if calls == 0:
            return CaptureError(
                f"requests {requests}: no route was handed over in layers {layers} in a forward of {num_tokens} tokens. Did "
                "it run these routers between begin_forward and end_forward, and not in a fused kernel, or in a graph that "
                "was recorded before the capturer was created?"
            )
        found = f"{calls} times" if calls > 1 else f"on {num_rows} of {num_tokens} tokens"
        if step.noted is None or step.noted[wrong[0]]:
            found += " beside an eager forward"
        return CaptureError(
            f"requests {requests}: compiled code ran layers {layers} {found} in one announced forward. Announce every "
            "forward by itself, and all rows of the batch: None or position -1 for those that pad it."
        )

    def _check_part(
        self, part: StepPart, position: int, routes: IntArray, token_ids: NDArray[np.int32]
    ) -> CaptureError | None:
        """Look for masked tokens and ids that are no expert's in one request's rows, [tokens, num_layers, topk]."""
        request_id = part.request.request_id
        masked = int((token_ids == MASKED).sum())
        if masked:
            return CaptureError(
                f"request {request_id!r}: attention_mask hides {masked} of the {len(token_ids)} tokens that were announced "
                f"from position {position} on. Announce a padded batch with token_positions(attention_mask)."
            )
        strangers = np.argwhere((routes < 0) | (routes >= self._num_experts))
        if not len(strangers):
            return None
        row, layer, slot = strangers[0].tolist()
        return CaptureError(
            f"request {request_id!r}: expert id {routes[row, layer, slot]} in layer_number {self._layer_numbers[layer]}, "
            f"position {position + row}: num_experts is {self._num_experts}. Read the ids before the dispatch side changes "
            "them."
        )
