"""The capturer that captures: hooks and buffer on the model, a step in flight, one RequestRoutes for each request."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_router_replay.capture.buffer import RoutingBuffer, write_routes
from megatron_router_replay.capture.capturer import RoutedExpertsCapturer
from megatron_router_replay.capture.errors import CaptureError
from megatron_router_replay.capture.output import CapturedRoutes
from megatron_router_replay.capture.requests import PromptRoutes, RequestRoutes
from megatron_router_replay.capture.routers import RouterSite, Select
from megatron_router_replay.capture.staging import HostStaging
from megatron_router_replay.capture.steps import StepPart, as_positions, iterate_runs


class ActiveCapturer(RoutedExpertsCapturer):
    """Captures; what each method takes, returns and raises stands in RoutedExpertsCapturer."""

    enabled = True

    def __init__(
        self,
        sites: Sequence[RouterSite],
        *,
        num_layers: int,
        max_num_tokens: int,
        publishes: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        self._num_experts, self._topk = _agreed(sites)
        self._layer_numbers = tuple(site.layer_number for site in sites)
        if not 1 <= self._layer_numbers[0] <= self._layer_numbers[-1] <= num_layers:
            raise CaptureError(f"layer_numbers {list(self._layer_numbers)} must lie in 1..num_layers={num_layers}.")
        if max_num_tokens < 1:
            raise CaptureError(f"max_num_tokens={max_num_tokens} must be 1 or more.")
        self._num_layers = num_layers
        self._publishes = publishes
        self.buffer = RoutingBuffer(
            num_layers=len(sites),
            max_num_tokens=max_num_tokens,
            topk=self._topk,
            num_experts=self._num_experts,
            device=torch.device(device) if device is not None else _device(sites[0].module),
            dtype=dtype,
        )
        self._staging = HostStaging(self.buffer.tensor) if publishes else None
        self._host_dtype = np.dtype(np.uint8 if self.buffer.tensor.dtype is torch.uint8 else np.int16)
        self._requests: dict[Hashable, RequestRoutes | None] = {}
        self._step: tuple[list[StepPart], int] | None = None
        self._pending: list[StepPart] = []
        self._modules: list[nn.Module] = []
        self._hooks: list[RemovableHandle] = []
        try:
            self._attach(sites)
        except BaseException:
            self.close()
            raise

    def add_request(
        self,
        request_id: Hashable,
        *,
        num_prompt_tokens: int,
        return_routed_experts: bool = True,
        num_cached_tokens: int = 0,
        prompt_of: Hashable | None = None,
    ) -> None:
        if request_id is None or request_id in self._requests:
            raise CaptureError(f"request id {request_id!r} is in use already, or None.")
        if num_prompt_tokens < 1 or not 0 <= num_cached_tokens < num_prompt_tokens:
            raise CaptureError(
                f"request {request_id!r}: num_prompt_tokens={num_prompt_tokens} must be 1 or more and "
                f"num_cached_tokens={num_cached_tokens} smaller: the last prompt token is always forwarded."
            )
        if not return_routed_experts or not self._publishes:
            self._requests[request_id] = None
            return
        if prompt_of is None:
            unwritten = self.buffer.unwritten
            prompt = PromptRoutes(num_prompt_tokens, len(self._layer_numbers), self._topk, self._host_dtype, unwritten)
        else:
            prompt = self._shared_prompt(request_id, prompt_of, num_prompt_tokens)
        self._requests[request_id] = RequestRoutes(request_id, prompt, num_cached_tokens)

    def begin_forward(
        self,
        request_ids: Sequence[Hashable | None],
        positions: Any,
        *,
        query_lengths: Sequence[int] | None = None,
        sequence_first: bool = False,
    ) -> None:
        if self._step is not None:
            raise CaptureError("a forward is begun already: end_forward() follows it, cancel_forward() if it raised.")
        array = as_positions(positions)
        if array.size > self.buffer.max_num_tokens:
            raise CaptureError(
                f"a forward of {array.size} token slots does not fit max_num_tokens={self.buffer.max_num_tokens}: create "
                "the capturer with more, or forward fewer at once."
            )
        parts = []
        for request_id, slots, position in iterate_runs(
            request_ids, array, query_lengths=query_lengths, sequence_first=sequence_first
        ):
            request = self._request(request_id)
            if request is not None:
                parts.append(StepPart(request, slots, position))
        if parts:
            assert self._staging is not None
            self._staging.hold_device()
            self.buffer.clear(array.size)
        self._step = (parts, array.size)

    def end_forward(self) -> None:
        if self._step is None:
            raise CaptureError("end_forward() without begin_forward().")
        (parts, num_slots), self._step = self._step, None
        if not parts:
            return
        assert self._staging is not None
        # The step before had a whole forward's time to arrive. Its rows leave the staging memory before new ones come.
        self.drain()
        self._staging.start_copy(num_slots)
        self._pending = parts

    def cancel_forward(self) -> None:
        self._step = None

    @contextmanager
    def _announced(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        self.begin_forward(*args, **kwargs)
        try:
            yield
        except BaseException:
            self.cancel_forward()
            raise
        self.end_forward()

    def forward(
        self,
        request_ids: Sequence[Hashable | None],
        positions: Any,
        *,
        query_lengths: Sequence[int] | None = None,
        sequence_first: bool = False,
    ) -> AbstractContextManager[None]:
        return self._announced(request_ids, positions, query_lengths=query_lengths, sequence_first=sequence_first)

    def finish(
        self, request_id: Hashable, *, token_ids: Any = None, num_tokens: int | None = None
    ) -> CapturedRoutes | None:
        request = self._request(request_id)
        if request is None:
            del self._requests[request_id]
            return None
        self.drain()
        ids = None if token_ids is None else as_positions(token_ids).astype(np.int32).reshape(-1)
        total = num_tokens if ids is None else len(ids)
        if total is None or (num_tokens is not None and num_tokens != total) or total < request.num_prompt_tokens:
            raise CaptureError(
                f"request {request_id!r}: {None if ids is None else len(ids)} token_ids, num_tokens={num_tokens}, "
                f"num_prompt_tokens={request.num_prompt_tokens}: give the number of prompt and output tokens together."
            )
        generation, written = request.generation(max(total - 1 - request.num_prompt_tokens, 0))
        missing = np.flatnonzero(~np.concatenate([request.prompt.written, written]))
        # Where nothing was generated, the last token is one of the prompt and its row may be left out.
        lost = missing[(missing >= request.num_cached_tokens) & (missing < max(total - 1, 1))]
        if lost.size:
            raise CaptureError(
                f"request {request_id!r}: {lost.size} of {total - 1} tokens were never forwarded between begin_forward and "
                f"end_forward, the first at position {lost[0]}. Were positions right, and num_cached_tokens announced?"
            )
        del self._requests[request_id]
        request.release()
        return CapturedRoutes(
            request_id=request_id,
            num_tokens=total,
            token_ids=ids,
            layer_numbers=self._layer_numbers,
            num_layers=self._num_layers,
            num_experts=self._num_experts,
            prompt=request.prompt,
            generation=generation,
        )

    def abort(self, request_id: Hashable) -> None:
        request = self._request(request_id)
        del self._requests[request_id]
        if request is not None:
            request.release()
            if not request.prompt.is_shared:
                self._pending = [part for part in self._pending if part.request is not request]

    def drain(self) -> None:
        if not self._pending:
            return
        assert self._staging is not None
        parts, self._pending = self._pending, []
        rows = self._staging.take()
        unwritten = rows[:, :, 0] == self.buffer.unwritten
        some_unwritten = bool(unwritten.any())
        for part in parts:
            if some_unwritten and unwritten[part.slots].any():
                raise self._explain_unwritten(unwritten[part.slots], part)
            part.request.write(part.position, rows[part.slots])

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            self.buffer.detach(module)
        for request in self._requests.values():
            if request is not None:
                request.release()
        self._hooks, self._modules, self._requests = [], [], {}
        self._pending, self._step = [], None

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def host_bytes(self) -> int:
        captured = [request for request in self._requests.values() if request is not None]
        prompts = {id(request.prompt): request.prompt for request in captured}
        shared = sum(prompt.rows.nbytes + prompt.written.nbytes for prompt in prompts.values())
        return int(shared + sum(request.num_bytes for request in captured))

    def _attach(self, sites: Sequence[RouterSite]) -> None:
        for layer_index, site in enumerate(sites):
            self.buffer.attach(site.module, layer_index)
            self._modules.append(site.module)
            if site.select is not None:
                self._hooks.append(site.module.register_forward_hook(_hook(site.select)))

    def _request(self, request_id: Hashable) -> RequestRoutes | None:
        try:
            return self._requests[request_id]
        except KeyError:
            raise CaptureError(
                f"request {request_id!r} is not running: add_request() it first; return_routed_experts=False for one that "
                "is not to be captured, None for a finished one that is still in the batch."
            ) from None

    def _shared_prompt(self, request_id: Hashable, owner: Hashable, num_prompt_tokens: int) -> PromptRoutes:
        other = self._request(owner)
        if other is None or other.num_prompt_tokens != num_prompt_tokens:
            raise CaptureError(
                f"request {request_id!r} cannot share the prompt of {owner!r}: that one is not captured, or its prompt is "
                f"not {num_prompt_tokens} tokens long."
            )
        other.prompt.is_shared = True
        return other.prompt

    def _explain_unwritten(self, bad: NDArray[np.bool_], part: StepPart) -> CaptureError:
        layers = [self._layer_numbers[i] for i in np.flatnonzero(bad.any(axis=0))]
        return CaptureError(
            f"request {part.request.request_id!r}: no route was written for {int(bad.any(axis=1).sum())} of its "
            f"{len(bad)} tokens in layers {layers}. Did the forward run these routers between begin_forward and "
            "end_forward, on all these token slots (not on a part, as under sequence parallelism), and not in a fused kernel "
            "or a graph recorded before create()?"
        )


def _hook(select: Select) -> Any:
    def write_output(module: nn.Module, args: Any, output: Any) -> None:
        write_routes(module, select(module, args, output))

    return write_output


def _agreed(sites: Sequence[RouterSite]) -> tuple[int, int]:
    if not sites:
        raise CaptureError("there is no router to capture: routers=[] was passed.")
    kinds = {(site.num_experts, site.topk) for site in sites}
    numbers = [site.layer_number for site in sites]
    if len(kinds) != 1 or len(set(numbers)) != len(numbers):
        raise CaptureError(
            f"all layers must have the same num_experts and topk and numbers of their own, got (num_experts, topk) "
            f"{sorted(kinds)} in layers {numbers}."
        )
    num_experts, topk = kinds.pop()
    if not 1 <= topk <= num_experts:
        raise CaptureError(f"topk={topk} must lie in 1..num_experts={num_experts}.")
    return num_experts, topk


def _device(module: nn.Module) -> torch.device:
    tensors = [*module.parameters(), *module.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")
