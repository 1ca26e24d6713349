"""Capturer: a sampling loop announces each forward and takes a request's routes when it ends."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron_router_replay.capture.buffer import UNSEEN, RoutingBuffer
from megatron_router_replay.capture.forward import Forward, as_integers, find_input_module, named_inputs
from megatron_router_replay.capture.log import RequestRows, StepLog
from megatron_router_replay.capture.routers import CaptureError, RouterSite, check_sites, find_router_sites
from megatron_router_replay.checks import as_integer
from megatron_router_replay.trace import RoutingTrace


class Capturer:
    """Capture the routes of requests that a loop announces.

    Create it before torch.compile first runs the model, and before CUDA graphs are recorded.

    Args:
        model: a transformers model; its routers are found automatically, and its input_ids are compared with the
            announcements.
        max_num_tokens: the most token slots of one forward, padding included: batch times prompt length.
        routers: the sites of any other model, instead of those found in `model`.
        tp_rank: every tensor-parallel rank has the same buffer, so that their graphs are the same; rank 0 alone keeps
            requests and returns traces.

    Raises:
        CaptureError: a router cannot be captured, or the layers differ in num_experts or topk.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        max_num_tokens: int = 8192,
        routers: Sequence[RouterSite] | None = None,
        tp_rank: int = 0,
    ) -> None:
        if routers is None:
            if model is None:
                raise CaptureError("MRR701: nothing to capture: pass the model, or routers=[RouterSite(...)].")
            routers = find_router_sites(model)
        sites = sorted(routers, key=lambda site: site.layer_number)
        self._num_experts, topk = check_sites(sites)
        if not 1 <= max_num_tokens < 1 << 24:
            raise CaptureError(f"MRR101: max_num_tokens={max_num_tokens} must lie in 1..{(1 << 24) - 1}.")
        self._layer_numbers = tuple(site.layer_number for site in sites)
        self._buffer = RoutingBuffer(
            num_layers=len(sites),
            max_num_tokens=max_num_tokens,
            topk=topk,
            num_experts=self._num_experts,
            device=_device(sites[0].module),
        )
        self._log = StepLog(self._buffer, self._layer_numbers, self._num_experts) if tp_rank == 0 else None
        self._requests: dict[Hashable, RequestRows] = {}
        self._numbers = count()
        self._forward: Forward | None = None
        self._hooks = [site.module.register_forward_hook(self._buffer.hook(i, site)) for i, site in enumerate(sites)]
        # Of a model that is seen to run, every token is compared; else `forward(input_ids=)` gives them.
        module = None if model is None else find_input_module(model)
        if module is not None:
            self._hooks.append(module.register_forward_pre_hook(self._see_forward, with_kwargs=True))

    def add_request(
        self,
        request_id: Hashable,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int = 0,
        prompt_of: Hashable | None = None,
    ) -> None:
        """Announce a request before its first forward.

        Args:
            num_cached_tokens: leading prompt tokens that come from a prefix cache and are never forwarded: they get no route.
            prompt_of: a running request with the same prompt: both share its rows. Exact if the prompt is forwarded
                once, with its cache expanded to n completions.

        Raises:
            CaptureError: the id is in use, `prompt_of` is not or has another length, or a number is out of range.
        """
        if request_id is None or request_id in self._requests:
            raise CaptureError(f"MRR702: request id {request_id!r} is in use already, or None.")
        num_prompt_tokens = as_integer("num_prompt_tokens", num_prompt_tokens, error=CaptureError)
        num_cached_tokens = as_integer("num_cached_tokens", num_cached_tokens, error=CaptureError)
        if num_prompt_tokens < 1 or not 0 <= num_cached_tokens < num_prompt_tokens:
            raise CaptureError(
                f"MRR702: request {request_id!r}: num_prompt_tokens={num_prompt_tokens} must be 1 or more and "
                f"num_cached_tokens={num_cached_tokens} smaller: the last prompt token is always forwarded."
            )
        request = RequestRows(request_id, next(self._numbers), num_prompt_tokens, num_cached_tokens)
        if prompt_of is not None:
            shared = self._request(prompt_of)
            if shared.num_prompt_tokens != num_prompt_tokens:
                raise CaptureError(
                    f"MRR702: request {request_id!r} cannot share the prompt of {prompt_of!r}: it has "
                    f"{shared.num_prompt_tokens} tokens, not {num_prompt_tokens}."
                )
            request.prompt = shared.prompt  # the same list: written once, read by all of them
        self._requests[request_id] = request

    @contextmanager
    def forward(
        self,
        request_ids: Sequence[Hashable | None],
        positions: Any,
        *,
        input_ids: Tensor | None = None,
    ) -> Iterator[None]:
        """Announce the forward inside this context. The copy to the host starts at its end.

        Args:
            request_ids: one per sequence of the batch; None: finished, a dummy, or not to be captured.
            positions: of each token in its own request (0 is the first prompt token), -1 on padding: [batch, length] as
                the forward gets input_ids, or [batch] for one token each. A packed batch is one of these, with a request id
                for each token. Better on the CPU: a GPU tensor is waited for.
            input_ids: the tokens of the forward; only where the model is not seen to take them (compiled code, CUDA graphs, a
                model without `input_ids`, a Capturer without a model).

        Raises:
            CaptureError: an id was not announced, shapes disagree, a forward was begun already, max_num_tokens is too small,
                or an earlier forward was not as announced: see `drain`.
        """
        if self._log is None:
            yield
            return
        if self._forward is not None:
            raise CaptureError("MRR702: a forward inside an announced forward: announce each separately.")
        numbers = np.array([-1 if name is None else self._request(name).number for name in request_ids], np.int64)
        forward = Forward.of_batch(numbers, as_integers(positions))
        num_tokens = len(forward.request_numbers)
        if num_tokens > self._buffer.max_num_tokens:
            raise CaptureError(
                f"MRR702: a forward of {num_tokens} token slots does not fit "
                f"max_num_tokens={self._buffer.max_num_tokens}: allow more, or forward fewer at once."
            )
        if input_ids is not None:
            forward.put_token_ids(self._buffer.token_ids, input_ids)
        self._forward = forward
        # A forward of dummies alone, as in warm-up, costs nothing.
        is_captured = bool((forward.request_numbers >= 0).any())
        try:
            if is_captured:
                self._buffer.begin(num_tokens)
            yield
        finally:
            self._forward = None
            self._buffer.end()
        if is_captured:
            try:
                if not self._log.has_room(forward):
                    self.drain()  # sorts the steps before this one, and frees their memory
            finally:
                # An error of an earlier step does not lose this one.
                self._log.append(forward)

    def finish(self, request_id: Hashable, token_ids: Any) -> RoutingTrace | None:
        """End a request and return its routes as one sample. Tensor-parallel ranks above 0 get None.

        The last sampled token was never forwarded, so it has no route; nor have tokens of a prefix cache. Later rows, of
        rejected speculative tokens or a batch that ran on, are dropped.

        Args:
            token_ids: [S], prompt and accepted output; compared with what the model ran at every position.

        Raises:
            CaptureError: the request is unknown, `token_ids` is shorter than its prompt, a token that is not from the prefix
                cache was never forwarded, or the model ran another token there. The request stays.
        """
        request = self._request(request_id)
        if self._log is None:
            del self._requests[request_id]
            return None
        ids = as_integers(token_ids).reshape(-1)
        if len(ids) < request.num_prompt_tokens:
            raise CaptureError(
                f"MRR704: request {request_id!r}: {len(ids)} token_ids, num_prompt_tokens={request.num_prompt_tokens}: give "
                "prompt and output tokens together."
            )
        # Without generated tokens, the last token is one of the prompt; its row counts if it was written.
        rows = self._rows(request_id, len(ids) if len(ids) == request.num_prompt_tokens else len(ids) - 1)
        is_needed = np.arange(len(rows)) < max(len(ids) - 1, 1)
        is_needed[: request.num_cached_tokens] = False  # forwarded by an earlier request, if at all
        check_rows(f"request {request_id!r}", rows, ids, is_needed)
        trace = self._trace([rows], ids, [len(ids)])
        del self._requests[request_id]
        return trace

    def abort(self, request_id: Hashable) -> None:
        """Drop a request and its memory. Completions that share its prompt keep the prompt's rows.

        Raises:
            CaptureError: the request is unknown.
        """
        self._request(request_id)
        with suppress(CaptureError):  # a request that loses a row by it raises when it ends
            self.drain()
        del self._requests[request_id]

    def drain(self) -> None:
        """Wait until every forward's routes are with their requests.

        Raises:
            CaptureError: a forward did not run every router once on all announced tokens, attention_mask hides an announced
                token, or an id is no expert's. Those tokens have no route; all others have theirs.
        """
        if self._log is not None:
            errors = self._log.sort({request.number: request for request in self._requests.values()})
            if errors:
                raise errors[0]

    def close(self) -> None:
        """Take the hooks off the model and drop all requests. Compiled code writes no more."""
        self._detach()
        self._requests = {}
        if self._log is not None:
            self._log.clear()

    def _detach(self) -> None:
        """Take the hooks off the model; the rows of requests stay."""
        for hook in self._hooks:
            hook.remove()
        self._buffer.is_open = False  # compiled code has the hooks inlined and still calls them

    def _rows(self, request_id: Hashable, num_rows: int) -> NDArray[Any]:
        """Return the first rows of a running request, written or not."""
        assert self._log is not None
        self.drain()  # its last steps may still be on their way
        return self._request(request_id).rows(num_rows, self._log.row_dtype)

    def _trace(self, samples: Sequence[NDArray[Any]], token_ids: NDArray[Any], lengths: Sequence[int]) -> RoutingTrace:
        """Return the rows of samples as one trace; rows that were not written, or are missing at the end, have no route."""
        parts = []
        for rows, length in zip(samples, lengths):
            routes = np.full((length, *rows["routes"].shape[1:]), -1, np.int16)  # -1: no route
            routes[: len(rows)][rows["is_written"]] = rows["routes"][rows["is_written"]]
            parts.append(routes)
        return RoutingTrace(
            topk_indices=np.concatenate(parts),
            layer_numbers=self._layer_numbers,
            num_experts=self._num_experts,
            token_ids=token_ids,
            sequence_lengths=tuple(lengths),
        )

    def _request(self, request_id: Hashable) -> RequestRows:
        try:
            return self._requests[request_id]
        except KeyError:
            raise CaptureError(
                f"MRR702: request {request_id!r} is not running: add_request() it first; pass None for a row that is "
                "not to be captured, or is finished and still in the batch."
            ) from None

    def _see_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare the inputs of the model's forward with the announcement."""
        if torch.compiler.is_compiling() or self._forward is None:
            return
        inputs = named_inputs(module, args, kwargs)
        if self._forward.was_run:
            raise CaptureError(
                "MRR702: a second forward of the model in one announced forward: announce each separately."
            )
        if isinstance(inputs.get("input_ids"), Tensor):
            self._forward.put_token_ids(self._buffer.token_ids, inputs["input_ids"], inputs.get("attention_mask"))
        self._forward.was_run = True


def check_rows(name: str, rows: NDArray[Any], token_ids: NDArray[np.int64], is_needed: NDArray[np.bool_]) -> None:
    """Raise unless every needed row was written, and the model ran these tokens wherever its input_ids were seen."""
    lost = np.flatnonzero(is_needed & ~rows["is_written"])
    if lost.size:
        raise CaptureError(
            f"MRR704: {name}: {lost.size} of {int(is_needed.sum())} tokens were never forwarded in an announced "
            f"forward, the first at position {lost[0]}. Were positions right, and num_cached_tokens announced?"
        )
    is_seen = rows["is_written"] & (rows["token_id"] != UNSEEN)
    wrong = np.flatnonzero(is_seen & (rows["token_id"] != token_ids[: len(rows)]))
    if wrong.size:
        raise CaptureError(
            f"MRR704: {name}: the model ran token {rows['token_id'][wrong[0]]} at position {wrong[0]}, token_ids has "
            f"{token_ids[wrong[0]]} ({wrong.size} of {len(rows)} differ). These routes are of other tokens: was the batch "
            "reordered, as in beam search, or padded otherwise than announced? Capture a beam by forwarding its finished "
            "sequence once more."
        )


def _device(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))
