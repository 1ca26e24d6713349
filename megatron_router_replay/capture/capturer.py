"""RoutedExpertsCapturer: what a sampling loop calls to have its requests' routes captured."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from megatron_router_replay.capture.errors import CaptureError
from megatron_router_replay.capture.output import CapturedRoutes
from megatron_router_replay.capture.routers import RouterSite, find_router_sites


class RoutedExpertsCapturer:
    """Captures nothing: what `create(enable=False)` returns, and the interface of the one that does.

    A loop may call it throughout, or ask `enabled` once a step. The model has no hook and no attribute of ours.
    """

    enabled = False

    @staticmethod
    def create(
        model: nn.Module | None = None,
        *,
        enable: bool = True,
        max_num_tokens: int = 8192,
        routers: Sequence[RouterSite] | None = None,
        num_layers: int | None = None,
        tp_rank: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> RoutedExpertsCapturer:
        """Return a capturer for a model, or with enable=False one that does nothing.

        Create it before torch.compile first runs the model, and before CUDA graphs are recorded.

        Args:
            model: a transformers or Megatron-Core model; its routers are found by themselves.
            max_num_tokens: the most token slots of one forward, padding included: batch times prompt length.
            routers: the sites of any other model, instead of those found in `model`.
            num_layers: all layers, dense ones included; default: the model config's, else the last layer_number.
            tp_rank: every tensor-parallel rank writes to a buffer, so that their graphs are the same; rank 0 publishes.
            device: default: that of the first router's parameters.
            dtype: of the buffer and host arrays, torch.uint8 or torch.int16; default: the smaller that fits.

        Raises:
            CaptureError: a router cannot be captured, or the layers differ in num_experts or topk.
        """
        if not enable:
            return RoutedExpertsCapturer()
        from megatron_router_replay.capture.active import ActiveCapturer

        if routers is None:
            if model is None:
                raise CaptureError("nothing to capture: pass the model, or routers=[RouterSite(...)].")
            routers = find_router_sites(model)
        sites = sorted(routers, key=lambda site: site.layer_number)
        if num_layers is None:
            num_layers = _num_layers(model, sites)
        return ActiveCapturer(
            sites,
            num_layers=num_layers,
            max_num_tokens=max_num_tokens,
            publishes=tp_rank == 0,
            device=device,
            dtype=dtype,
        )

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

    def begin_forward(
        self,
        request_ids: Sequence[Hashable | None],
        positions: Any,
        *,
        query_lengths: Sequence[int] | None = None,
        sequence_first: bool = False,
    ) -> None:
        """Say whose tokens the next forward holds.

        Args:
            request_ids: one per sequence of the batch; None: finished, or a dummy.
            positions: of each token in its own request (0 is the first prompt token), -1 on padding: [batch, length] as
                the forward gets input_ids, [batch] for one token each, or with `query_lengths` [tokens] of a packed
                batch. Better on the CPU: a GPU tensor is waited for.
            query_lengths: tokens of each request in a packed batch.
            sequence_first: the model routes tokens s-major, as Megatron does; positions are [length, batch].

        Raises:
            CaptureError: an id was not announced, shapes disagree, a forward was begun already, or max_num_tokens is
                too small.
        """

    def end_forward(self) -> None:
        """Start the copy of what was routed since begin_forward; the routes before it are sorted into requests.

        Raises:
            CaptureError: no forward was begun, or in the one before a router did not write all its rows.
        """

    def cancel_forward(self) -> None:
        """Forget a forward that raised between begin_forward and end_forward."""

    def forward(
        self,
        request_ids: Sequence[Hashable | None],
        positions: Any,
        *,
        query_lengths: Sequence[int] | None = None,
        sequence_first: bool = False,
    ) -> AbstractContextManager[None]:
        """Return a context manager around one forward: begin_forward and end_forward, cancel_forward if it raises."""
        return nullcontext()

    def finish(
        self, request_id: Hashable, *, token_ids: Any = None, num_tokens: int | None = None
    ) -> CapturedRoutes | None:
        """End a request and return its routes; None if it did not opt in, or this rank does not publish.

        Rows behind the last token but one, of rejected speculative tokens or a batch that ran on, are dropped.

        Args:
            token_ids: [S], prompt and accepted output; goes into the trace, which can then prove that both fit.
            num_tokens: S, where ids are not known.

        Raises:
            CaptureError: the request is unknown, S is unknown or shorter than the prompt, or a token that is not from
                the prefix cache was never forwarded. The request stays.
        """
        return None

    def abort(self, request_id: Hashable) -> None:
        """Drop a request and its memory.

        Raises:
            CaptureError: the request is unknown.
        """

    def drain(self) -> None:
        """Wait until every forward's routes are with their requests; needed before forwards that are not announced."""

    def close(self) -> None:
        """Take hooks and buffer off the model and drop all requests."""

    @property
    def num_requests(self) -> int:
        return 0

    @property
    def host_bytes(self) -> int:
        """Bytes of the requests' host arrays; a prompt that several share counts once."""
        return 0


def _num_layers(model: nn.Module | None, sites: Sequence[RouterSite]) -> int:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("num_hidden_layers", "num_layers"):
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return max((site.layer_number for site in sites), default=0)
