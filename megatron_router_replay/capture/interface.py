"""RoutedExpertsCapturer: what a sampling loop calls to have its requests' routes captured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from megatron_router_replay.capture.output import CapturedRoutes


class RoutedExpertsCapturer(ABC):
    """What `create_capturer` returns: one that captures, or with enable=False one that does nothing.

    A loop may call it throughout, or ask `enabled` once a step.
    """

    enabled: bool

    @abstractmethod
    def add_request(
        self,
        request_id: Hashable,
        *,
        num_prompt_tokens: int,
        return_routed_experts: bool = True,
        num_cached_tokens: int = 0,
        prompt_of: Hashable | None = None,
    ) -> None:
        """Announce a request before its first forward.

        Args:
            return_routed_experts: False: its tokens are not captured and finish() returns None.
            num_cached_tokens: leading prompt tokens that come from a prefix cache and are never forwarded.
            prompt_of: a running request whose prompt is the same: both have one array of prompt routes, filled by whichever
                is forwarded first. Exact where the prompt is forwarded once, with its cache expanded to n completions.

        Raises:
            CaptureError: the id is in use, `prompt_of` is not or has another length, or a number is out of range.
        """

    @abstractmethod
    def begin_forward(
        self,
        request_ids: Sequence[Hashable | None],
        positions: Any,
        *,
        query_lengths: Sequence[int] | None = None,
        sequence_first: bool = False,
        input_ids: Tensor | None = None,
    ) -> None:
        """Say whose tokens the next forward holds.

        Args:
            request_ids: one per sequence of the batch; None: finished, or a dummy.
            positions: of each token in its own request (0 is the first prompt token), -1 on padding: [batch, length] as
                the forward gets input_ids, [batch] for one token each, or with `query_lengths` [tokens] of a packed
                batch. Better on the CPU: a GPU tensor is waited for.
            query_lengths: tokens of each request in a packed batch.
            sequence_first: the model routes tokens s-major, as Megatron does; positions are [length, batch].
            input_ids: [batch, length] or packed [tokens], the tokens of the forward; only where the model is not seen to take
                them (compiled code, CUDA graphs, a model without `input_ids`, create_capturer without a model).

        Raises:
            CaptureError: an id was not announced, shapes disagree, a forward was begun already, or max_num_tokens is
                too small.
        """

    @abstractmethod
    def end_forward(self) -> None:
        """Start the copy of what was routed since begin_forward; routes of earlier steps may be sorted into requests.

        Raises:
            CaptureError: no forward was begun, someone wrote to a router's ids, or an earlier forward was not as announced:
                see `drain`.
        """

    @abstractmethod
    def cancel_forward(self) -> None:
        """Forget a forward that raised between begin_forward and end_forward."""

    @abstractmethod
    def forward(
        self,
        request_ids: Sequence[Hashable | None],
        positions: Any,
        *,
        query_lengths: Sequence[int] | None = None,
        sequence_first: bool = False,
        input_ids: Tensor | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context manager around one forward: begin_forward and end_forward, cancel_forward if it raises.

        Inside it the model and its routers raise CaptureError where they see another number of tokens than announced, or
        run a second time.
        """

    @abstractmethod
    def finish(
        self, request_id: Hashable, *, token_ids: Any = None, num_tokens: int | None = None
    ) -> CapturedRoutes | None:
        """End a request and return its routes; None if it did not opt in, or this rank does not publish.

        Rows behind the last token but one, of rejected speculative tokens or a batch that ran on, are dropped.

        Args:
            token_ids: [S], prompt and accepted output; compared with what the model ran at every position, and put into the
                trace, which can then prove that both fit.
            num_tokens: S, where ids are not known. Nothing can be compared then: a batch that was reordered, as in beam
                search, or padded otherwise than announced goes unnoticed.

        Raises:
            CaptureError: the request is unknown, S is unknown or shorter than the prompt, a token that is not from the
                prefix cache was never forwarded, or the model ran another token there. The request stays.
        """

    @abstractmethod
    def abort(self, request_id: Hashable) -> None:
        """Drop a request and its memory.

        Raises:
            CaptureError: the request is unknown.
        """

    @abstractmethod
    def drain(self) -> None:
        """Wait until every forward's routes are with their requests.

        Raises:
            CaptureError: in a forward, compiled code did not run every router once on all announced tokens, attention_mask
                hides an announced token, or an id is no expert's. Those tokens have no route; all others have theirs.
        """

    @abstractmethod
    def close(self) -> None:
        """Take hooks and buffer off the model and drop all requests."""

    @property
    @abstractmethod
    def num_requests(self) -> int:
        """Requests that are announced and not finished."""

    @property
    @abstractmethod
    def host_bytes(self) -> int:
        """Bytes of the requests' host arrays; a prompt that several share counts once."""
