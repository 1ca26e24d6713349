"""The rows of requests on the host, and the steps on their way there, which are sorted into them many at a time.

On a GPU each step is one asynchronous copy into pinned memory on a stream of its own. Sorting single steps would cost
some Python for each request of each step, so steps wait here until the memory is full or a request ends.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_router_replay.capture.buffer import CALL, MASKED, UNSEEN, RoutingBuffer
from megatron_router_replay.capture.forward import Forward
from megatron_router_replay.capture.routers import CaptureError
from megatron_router_replay.trace.ids import index_dtype

_MIN_TOKENS = 2048
"""Room for so many tokens at least: 32 decode steps of 64 requests."""

Array = NDArray[Any]


@dataclass(slots=True, eq=False)
class RequestRows:
    """Rows of a request.

    Args:
        request_id: the caller's.
        number: counts requests; steps refer to requests by it.
        num_prompt_tokens: positions from here on are of the generation.
        num_cached_tokens: leading positions that come from a prefix cache and are never forwarded.
        prompt: the parts of the prompt in the order in which they ran; the same list for requests that share their prompt.
        generation: the parts of the generation.
    """

    request_id: Hashable
    number: int
    num_prompt_tokens: int
    num_cached_tokens: int
    prompt: list[Array] = field(default_factory=list)
    generation: list[Array] = field(default_factory=list)

    def write(self, tokens: Array, dtype: np.dtype[Any]) -> None:
        """Store tokens of forwards, each with the fields of `dtype`, as its rows."""
        in_prompt = tokens["position"] < self.num_prompt_tokens
        for parts, own in ((self.prompt, tokens[in_prompt]), (self.generation, tokens[~in_prompt])):
            if len(own):
                rows = np.empty(len(own), dtype)
                for name in ("position", "token_id", "routes", "is_written"):
                    rows[name] = own[name]
                parts.append(rows)

    def rows(self, num_rows: int, dtype: np.dtype[Any]) -> Array:
        """Return the row of each position below `num_rows`; those that no forward wrote are marked."""
        rows = np.zeros(num_rows, dtype)
        for part in (*self.prompt, *self.generation):
            part = part[part["position"] < num_rows]
            rows[part["position"]] = part  # a position that ran again has its last row
        return rows


class StepLog:
    """Host memory for consecutive steps.

    Args:
        buffer: the device memory that is copied from.
        layer_numbers, num_experts: of the routes.

    `row_dtype` is the dtype of a request's rows: routes as the trace stores them, because the buffer's wider values for
    invalid ids never reach a request, the token that the model ran, and whether any forward wrote the row.
    """

    def __init__(self, buffer: RoutingBuffer, layer_numbers: Sequence[int], num_experts: int) -> None:
        self._buffer = buffer
        self._layer_numbers = np.asarray(layer_numbers)
        self._num_experts = num_experts
        shape = (len(layer_numbers), buffer.topk)
        ids = torch.empty(0, dtype=buffer.routes.dtype).numpy().dtype
        fields = [("number", np.int64), ("position", np.int64), ("token_id", np.int32), ("routes", ids, shape)]
        self._token_dtype = np.dtype([*fields, ("is_written", np.bool_)])
        narrow = np.uint8 if index_dtype(num_experts) is torch.uint8 else np.int16
        self.row_dtype = np.dtype(
            [("position", np.int32), ("token_id", np.int32), ("routes", narrow, shape), ("is_written", np.bool_)]
        )
        self._steps: list[tuple[Forward, Tensor]] = []
        self._used = 0
        device, max_num_tokens = buffer.head.device, buffer.max_num_tokens
        self._on_gpu = device.type == "cuda"
        with torch.inference_mode(False):
            size = buffer.step_size(max(max_num_tokens, _MIN_TOKENS))
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._on_gpu)
            if self._on_gpu:
                self._staging = torch.empty(buffer.step_size(max_num_tokens), dtype=torch.uint8, device=device)
                self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def has_room(self, forward: Forward) -> bool:
        """Return whether another step fits."""
        return self._used + self._buffer.step_size(len(forward.request_numbers)) <= len(self._memory)

    def append(self, forward: Forward) -> None:
        """Copy a step from the buffer after its forward, without a synchronization."""
        num_tokens = len(forward.request_numbers)
        size = self._buffer.step_size(num_tokens)
        memory = self._memory[self._used : self._used + size]
        if not self._on_gpu:
            self._buffer.gather(memory, num_tokens)
        else:
            current = torch.cuda.current_stream(self._staging.device)
            # The staging memory is free when the step before has left it, a whole forward ago.
            current.wait_event(self._copied)
            self._buffer.gather(self._staging[:size], num_tokens)
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                memory.copy_(self._staging[:size], non_blocking=True)
                self._copied.record()
        forward.eager_stamps = self._buffer.eager_stamps
        self._used += size
        self._steps.append((forward, memory))

    def clear(self) -> list[tuple[Forward, Tensor]]:
        """Wait for the copies and return the steps; their memory is valid until the next append."""
        if self._on_gpu:
            self._copied.synchronize()
        steps, self._steps, self._used = self._steps, [], 0
        return steps

    def sort(self, requests: Mapping[int, RequestRows]) -> list[CaptureError]:
        """Write the rows of all steps to their requests; return an error for each step or request that does not add up.

        Args:
            requests: those that run, by number; rows of others are dropped.
        """
        errors: list[CaptureError] = []
        parts = [np.zeros(0, self._token_dtype)]  # concatenate needs one array at least
        for forward, memory in self.clear():
            num_tokens = len(forward.request_numbers)
            head, routes = (part.numpy() for part in self._buffer.split_step(memory, num_tokens))
            stamps, token_ids = np.split(head, [len(self._layer_numbers)])
            tokens = np.zeros(num_tokens, self._token_dtype)
            tokens["number"], tokens["position"] = forward.request_numbers, forward.positions
            tokens["token_id"] = token_ids if forward.has_token_ids else UNSEEN
            tokens["routes"] = routes.swapaxes(0, 1)  # the device writes layer by layer, a request has rows by token
            # Padding (-1) and requests that have ended since the step ran.
            tokens = tokens[np.isin(tokens["number"], list(requests))]
            # Compiled code and graphs stamp on the device, eager routers in Python; a layer may use either.
            stamps = stamps + np.asarray(forward.eager_stamps)
            # One call on all tokens, in every layer: else the step's rows may be another forward's.
            wrong = np.flatnonzero(stamps != CALL + num_tokens)
            # They go on to their requests all the same, where they end the rows that earlier forwards wrote there: the
            # route of a rejected draft is not that of the accepted token.
            tokens["is_written"] = not wrong.size
            parts.append(tokens)
            if wrong.size and len(tokens):
                names = [requests[number].request_id for number in dict.fromkeys(tokens["number"].tolist())]
                errors.append(self._stamp_error(names, self._layer_numbers[wrong], int(stamps[wrong[0]]), num_tokens))
        tokens = np.concatenate(parts)
        # Stable: where a position was run again, the later row is written later.
        tokens = tokens[np.argsort(tokens["number"], kind="stable")]
        # Each run of equal numbers is one request: a few array operations for it, however many steps it took.
        for start, end in pairwise(np.flatnonzero(np.diff(tokens["number"], prepend=-1, append=-1))):
            request, own = requests[int(tokens["number"][start])], tokens[start:end]
            is_expert = (own["routes"] >= 0) & (own["routes"] < self._num_experts)
            is_exact = is_expert.all(axis=(1, 2)) & (own["token_id"] != MASKED)
            if (inexact := own["is_written"] & ~is_exact).any():
                errors.append(self._token_error(request.request_id, own[inexact], is_expert[inexact]))
            # Inexact rows count as unwritten, so that `finish` names them if they are needed.
            own["is_written"] &= is_exact
            request.write(own, self.row_dtype)
        return errors

    def _stamp_error(self, names: list[Any], layers: Array, stamp: int, num_tokens: int) -> CaptureError:
        """Return the error of layers that did not run once on all tokens."""
        calls, num_rows = divmod(stamp, CALL)
        return CaptureError(
            f"MRR702: requests {names}: layers {layers.tolist()} routed {num_rows} tokens in {calls} calls in a "
            f"forward that was announced with {num_tokens} tokens. Announce every forward separately, and all rows of "
            "the batch: None or position -1 for those that pad it. A fused kernel routes unseen, as does a graph "
            "recorded before the capturer."
        )

    def _token_error(self, name: Any, tokens: Array, is_expert: Array) -> CaptureError:
        """Return the error of tokens without a route: the mask hides them, or the first has an id outside the range."""
        if num_masked := int((tokens["token_id"] == MASKED).sum()):
            return CaptureError(
                f"MRR702: request {name!r}: attention_mask hides {num_masked} tokens that were announced. Announce a "
                "padded batch with token_positions(attention_mask)."
            )
        layer = int((~is_expert[0]).any(axis=1).argmax())
        return CaptureError(
            f"MRR103: request {name!r}: an expert id outside of 0..{self._num_experts - 1} in layer_number "
            f"{self._layer_numbers[layer]}, position {tokens['position'][0]}. Read the ids before the dispatch side changes "
            "them."
        )
