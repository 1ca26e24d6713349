"""The capturer that captures: a seam at every router, a step in flight, one RequestRoutes for each request."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_router_replay.capture.buffer import RoutingBuffer
from megatron_router_replay.capture.errors import CaptureError
from megatron_router_replay.capture.inputs import TokenSlots, watch_inputs
from megatron_router_replay.capture.interface import RoutedExpertsCapturer
from megatron_router_replay.capture.log import StepLog
from megatron_router_replay.capture.output import CapturedRoutes
from megatron_router_replay.capture.recorder import StepRecorder
from megatron_router_replay.capture.requests import PromptRoutes, RequestRoutes
from megatron_router_replay.capture.routers import RouterSite
from megatron_router_replay.capture.seam import LayerSeam, attach, detach, hook_of
from megatron_router_replay.capture.sort import LoggedStep, StepSorter
from megatron_router_replay.capture.steps import StepPlan, as_positions


class ActiveCapturer(RoutedExpertsCapturer):
    """Captures; what each method takes, returns and raises stands in RoutedExpertsCapturer."""

    enabled = True

    def __init__(
        self,
        sites: Sequence[RouterSite],
        *,
        model: nn.Module | None,
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
        self._host_dtype = np.dtype(np.uint8 if self.buffer.tensor.dtype is torch.uint8 else np.int16)
        self._recorder = StepRecorder(self._layer_numbers, topk=self._topk, device=self.buffer.tensor.device)
        self._tokens = TokenSlots(self.buffer.token_ids)
        self._log = StepLog(self.buffer) if publishes else None
        self._logged: list[LoggedStep] = []
        self._sorter = StepSorter(self._layer_numbers, num_experts=self._num_experts, dtype=self._host_dtype)
        self._requests: dict[Hashable, RequestRoutes | None] = {}
        self._plan: StepPlan | None = None
        self._in_flight: StepPlan | None = None
        self._modules: list[nn.Module] = []
        self._hooks: list[RemovableHandle] = []
        try:
            self._attach(sites, model)
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
            prompt = PromptRoutes(num_prompt_tokens, len(self._layer_numbers), self._topk, self._host_dtype)
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
        input_ids: Tensor | None = None,
    ) -> None:
        if self._in_flight is not None:
            raise CaptureError("a forward is begun already: end_forward() follows it, cancel_forward() if it raised.")
        array = as_positions(positions)
        plan = self._plan
        if plan is None or query_lengths is not None or not plan.holds_for(request_ids, array):
            if array.size > self.buffer.max_num_tokens:
                raise CaptureError(
                    f"a forward of {array.size} token slots does not fit max_num_tokens={self.buffer.max_num_tokens}: create "
                    "the capturer with more, or forward fewer at once."
                )
            self._plan = plan = StepPlan(
                request_ids, array, query_lengths=query_lengths, sequence_first=sequence_first, find=self._request
            )
        if plan.parts:
            assert self._log is not None
            self._recorder.begin(plan.num_tokens)
            self._tokens.begin(
                plan.num_tokens, len(request_ids), sequence_first=sequence_first, is_packed=query_lengths is not None
            )
            # Stamps, token ids and what compiled code writes to may still be on their way to the host.
            self._log.hold_device()
            self.buffer.clear_stamps()
            if input_ids is not None:
                self._tokens.put(input_ids)
            self._tokens.is_announced = self._recorder.is_announced = True
        self._in_flight = plan

    def end_forward(self) -> None:
        if self._in_flight is None:
            raise CaptureError("end_forward() without begin_forward().")
        plan = self._in_flight
        earlier_error = None
        try:
            if plan.parts:
                assert self._log is not None
                if not self._log.has_room(plan.num_tokens):
                    # The step before had a whole forward's time to arrive. What was wrong in it is no fault of this one.
                    try:
                        self.drain()
                    except CaptureError as error:
                        earlier_error = error
                self._log.append(self._recorder, plan.num_tokens)
                noted = None if self._recorder.is_complete else self._recorder.noted()
                self._logged.append(LoggedStep(plan, plan.advance(), noted, self._tokens.are_known))
        finally:
            self.cancel_forward()
        if earlier_error is not None:
            raise earlier_error

    def cancel_forward(self) -> None:
        self._in_flight = None
        self._recorder.end()
        self._tokens.is_announced = False

    def forward(
        self,
        request_ids: Sequence[Hashable | None],
        positions: Any,
        *,
        query_lengths: Sequence[int] | None = None,
        sequence_first: bool = False,
        input_ids: Tensor | None = None,
    ) -> AbstractContextManager[None]:
        return _AnnouncedForward(self, request_ids, positions, query_lengths, sequence_first, input_ids)

    def finish(
        self, request_id: Hashable, *, token_ids: Any = None, num_tokens: int | None = None
    ) -> CapturedRoutes | None:
        request = self._request(request_id)
        if request is None:
            self._forget(request_id)
            return None
        self.drain()
        ids = None if token_ids is None else as_positions(token_ids).astype(np.int32).reshape(-1)
        total = num_tokens if ids is None else len(ids)
        if total is None or (num_tokens is not None and num_tokens != total) or total < request.num_prompt_tokens:
            raise CaptureError(
                f"request {request_id!r}: {None if ids is None else len(ids)} token_ids, num_tokens={num_tokens}, "
                f"num_prompt_tokens={request.num_prompt_tokens}: give the number of prompt and output tokens together."
            )
        num_generated_rows = max(total - 1 - request.num_prompt_tokens, 0)
        generation, written = request.generation(num_generated_rows)
        missing = np.flatnonzero(~np.concatenate([request.prompt.written, written]))
        # Where nothing was generated, the last token is one of the prompt and its row may be left out.
        lost = missing[(missing >= request.num_cached_tokens) & (missing < max(total - 1, 1))]
        if lost.size:
            raise CaptureError(
                f"request {request_id!r}: {lost.size} of {total - 1} tokens were never forwarded between begin_forward and "
                f"end_forward, the first at position {lost[0]}. Were positions right, and num_cached_tokens announced?"
            )
        if ids is not None:
            _compare(request_id, request.seen_token_ids(num_generated_rows), ids)
        self._forget(request_id)
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
        self._forget(request_id)
        if request is not None:
            request.abandon()

    def drain(self) -> None:
        if self._log is None or not self._logged:
            return
        steps, self._logged = self._logged, []
        errors = self._sorter.sort(steps, *self._log.take())
        if errors:
            raise errors[0]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for module in self._modules:
            detach(module)
        for request in self._requests.values():
            if request is not None:
                request.release()
        self.cancel_forward()
        self._hooks, self._modules, self._requests, self._plan = [], [], {}, None
        if self._logged and self._log is not None:
            self._log.take()
            self._logged = []

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def host_bytes(self) -> int:
        captured = [request for request in self._requests.values() if request is not None]
        prompts = {id(request.prompt): request.prompt for request in captured}
        return sum(prompt.num_bytes for prompt in prompts.values()) + sum(request.num_bytes for request in captured)

    def _attach(self, sites: Sequence[RouterSite], model: nn.Module | None) -> None:
        for layer_index, site in enumerate(sites):
            attach(site.module, LayerSeam(layer_index, self.buffer, self._recorder))
            self._modules.append(site.module)
            if site.select is not None:
                self._hooks.append(site.module.register_forward_hook(hook_of(site.select)))
        watched = None if model is None else watch_inputs(model, self._tokens.see_run)
        if watched is not None:
            self._hooks.append(watched)

    def _request(self, request_id: Hashable) -> RequestRoutes | None:
        try:
            return self._requests[request_id]
        except KeyError:
            raise CaptureError(
                f"request {request_id!r} is not running: add_request() it first; return_routed_experts=False for one that "
                "is not to be captured, None for a finished one that is still in the batch."
            ) from None

    def _forget(self, request_id: Hashable) -> None:
        del self._requests[request_id]
        # It names this request; the same id may come again.
        self._plan = None

    def _shared_prompt(self, request_id: Hashable, owner: Hashable, num_prompt_tokens: int) -> PromptRoutes:
        other = self._request(owner)
        if other is None or other.num_prompt_tokens != num_prompt_tokens:
            raise CaptureError(
                f"request {request_id!r} cannot share the prompt of {owner!r}: that one is not captured, or its prompt is "
                f"not {num_prompt_tokens} tokens long."
            )
        other.prompt.is_shared = True
        return other.prompt


class _AnnouncedForward:
    """begin_forward, and end_forward or cancel_forward; written out, for a generator costs more in each step."""

    __slots__ = ("_arguments", "_capturer")

    def __init__(self, capturer: ActiveCapturer, *arguments: Any) -> None:
        self._capturer = capturer
        self._arguments = arguments

    def __enter__(self) -> None:
        request_ids, positions, query_lengths, sequence_first, input_ids = self._arguments
        self._capturer.begin_forward(
            request_ids,
            positions,
            query_lengths=query_lengths,
            sequence_first=sequence_first,
            input_ids=input_ids,
        )

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._capturer.end_forward()
        else:
            self._capturer.cancel_forward()


def _compare(request_id: Hashable, seen: NDArray[np.int32], token_ids: NDArray[np.int32]) -> None:
    """Raise unless the model ran these tokens, wherever its input_ids were seen."""
    wrong = np.flatnonzero((seen >= 0) & (seen != token_ids[: len(seen)]))
    if wrong.size:
        first = int(wrong[0])
        raise CaptureError(
            f"request {request_id!r}: the model ran token {seen[first]} at position {first}, token_ids has "
            f"{token_ids[first]} ({wrong.size} of {len(seen)} differ). These routes are of other tokens: was the batch "
            "reordered, as in beam search, or padded otherwise than announced? Capture a beam by forwarding its finished "
            "sequence once more."
        )


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
