"""The routes of an engine's requests stay on the rank that generated them, and go where they are trained.

    store.keep(request_id, tokens, routes, ...)            on each rank of the engine, when a request is finished
    ticket = store.ticket(request_id)                      on a rank of the engine; it goes to all ranks
    rows = store.fetch([Piece(ticket, 0, 7)], layers, ...) on all ranks: each names the rows that it trains

A record that reaches every rank carries the ticket, and not the routes: 1,024 samples of 4,096 tokens with 48 layers and 8
experts have 1.6 GB of routes, one byte an expert. A rank gets the rows of its own samples and the layers of its own stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.errors import PayloadError
from megatron_router_replay.together import raise_together
from megatron_router_replay.trace.ids import index_dtype

_MESSAGE_BYTES = 64 << 20
"""The most bytes of a rank's messages at a time; with NCCL they need as much memory on the GPU."""


class Ticket(NamedTuple):
    """Name a finished request on all ranks.

    Args:
        engine: the lowest rank of the model-parallel group that generated it.
        request_id: of that engine.
        collection: `RequestRoutes.collection` when the request was finished.
    """

    engine: int
    request_id: int
    collection: int


class Piece(NamedTuple):
    """The rows `begin` to `end` of a request: the routes of its tokens at these positions."""

    ticket: Ticket
    begin: int
    end: int


class _Query(NamedTuple):
    """A rank's request for rows of another rank."""

    places: tuple[int, ...]  # of the layers, in the other rank's list
    layers: tuple[int, ...]  # the same layers, in this rank's list
    pieces: tuple[int, ...]  # in this rank's list
    rows: tuple[tuple[int, int, int], ...]  # request_id, begin, end of each piece


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    tokens: Tensor  # [T] int32
    routes: Tensor  # [T - 1, layers, topk], the narrowest dtype for all experts
    collection: int


class RequestRoutes:
    """The routes of the requests that this rank's engine finished, until they are trained or too old.

    Attributes:
        engine: the lowest rank of this rank's engine; -1: this rank generated nothing yet.
        layers: the layer number of each router that the engine records, in its order.
        collection: the number of collections of rollouts trained so far, the same on all ranks.
        bytes_received: of the newest `fetch`, from other ranks.
    """

    def __init__(self) -> None:
        self.engine = -1
        self.layers: tuple[int, ...] = ()
        self.collection = 0
        self.bytes_received = 0
        self._requests: dict[int, _Request] = {}

    def keep(self, request_id: int, tokens: Tensor, routes: Tensor, *, num_experts: int) -> None:
        """Keep the routes of a finished request.

        Args:
            tokens: [T] integers, of prompt and response.
            routes: [T - 1, layers, topk] integers.

        Raises:
            PayloadError: `routes` has a wrong number of rows or layers.
        """
        if routes.shape[:2] != (len(tokens) - 1, len(self.layers)):
            raise PayloadError(
                f"MRR802: request {request_id} has {len(tokens)} tokens, so its routes must be {len(tokens) - 1} rows of "
                f"{len(self.layers)} layers ({list(self.layers)}), but they are {list(routes.shape)}."
            )
        self._requests[request_id] = _Request(
            tokens=tokens.to(torch.int32),
            routes=routes.to(index_dtype(num_experts)),
            collection=self.collection,
        )

    def ticket(self, request_id: int) -> Ticket | None:
        """Return the ticket of a request; None: it has no routes."""
        request = self._requests.get(request_id)
        return None if request is None else Ticket(self.engine, request_id, request.collection)

    def check_tokens(self, ticket: Ticket, tokens: Tensor, name: str) -> None:
        """Check that a request has the tokens of a rollout's turn, on the ranks that have its routes.

        Raises:
            PayloadError: they differ.
        """
        request = self._requests.get(ticket.request_id) if ticket.engine == self.engine else None
        if request is None or torch.equal(request.tokens, tokens.to(torch.int32)):
            return
        shared = min(len(tokens), len(request.tokens))
        differs = (request.tokens[:shared] != tokens[:shared]).nonzero().flatten().tolist()
        where = f"position {differs[0]}" if differs else f"their lengths, {len(request.tokens)} and {len(tokens)}"
        raise PayloadError(f"MRR802: {name}: the engine's request and the rollout have different tokens: {where}.")

    def forget(self, tickets: Sequence[Ticket], *, before: int) -> None:
        """Drop the routes of requests that were trained, and of those that were finished before a collection."""
        trained = {each.request_id for each in tickets if each.engine == self.engine}
        self._requests = {
            number: request
            for number, request in self._requests.items()
            if number not in trained and request.collection >= before
        }

    def fetch(self, pieces: Sequence[Piece], layers: Sequence[int], *, topk: int, num_experts: int) -> list[Tensor]:
        """Return the routes of each piece, [end - begin, layers, topk], the narrowest dtype for all experts.

        A collective over all ranks of the job. Rows go as bytes, from a rank that has them to the one that needs them.

        Raises:
            PayloadError: on all ranks alike: no rank has the routes of a request, or a layer of them.
        """
        me, world, dtype = dist.get_rank(), dist.get_world_size(), index_dtype(num_experts)
        engines: list[Any] = [None] * world
        dist.all_gather_object(engines, (self.engine, self.layers))
        queries: dict[int, _Query] | Exception
        try:
            queries = _queries(pieces, tuple(layers), engines, me)
        except Exception as error:  # whatever it is, the other ranks must not wait for this one
            queries = error
        all_queries = raise_together(queries, _error_of_peers)

        # Each rank packs the rows for the other ranks.
        width = topk * dtype.itemsize
        sent: list[Tensor] = []
        fault: Exception | None = None
        try:
            sent = [self._pack(all_queries[rank].get(me)) for rank in range(world)]
        except Exception as error:
            fault = error
        raise_together(fault, _error_of_peers)

        # The size of each message follows from the queries, which all ranks have.
        sizes = [
            [
                0 if query is None else len(query.places) * width * sum(end - begin for _, begin, end in query.rows)
                for query in row
            ]
            for row in ([queries.get(rank) for rank in range(world)] for queries in all_queries)
        ]
        received = _exchange(sent, sizes, me)
        self.bytes_received = sum(len(part) for rank, part in enumerate(received) if rank != me)
        result = [torch.zeros(end - begin, len(layers), topk, dtype=dtype) for _, begin, end in pieces]
        for rank, query in all_queries[me].items():
            start = 0
            for number, (_, begin, end) in zip(query.pieces, query.rows):
                size = (end - begin) * len(query.places) * width
                values = received[rank][start : start + size].view(dtype)
                result[number][:, list(query.layers)] = values.view(end - begin, len(query.places), topk)
                start += size
        return result

    def _pack(self, query: _Query | None) -> Tensor:
        """Return the rows that a rank requests, as bytes."""
        if query is None:
            return torch.empty(0, dtype=torch.uint8)
        parts = []
        for request_id, begin, end in query.rows:
            request = self._requests.get(request_id)
            if request is None:
                raise PayloadError(
                    f"MRR802: rank {dist.get_rank()} has no routes of request {request_id}, but another rank of its engine "
                    "has some."
                )
            rows = request.routes[begin:end][:, list(query.places)]
            parts.append(rows.contiguous().view(-1).view(torch.uint8))
        return torch.cat(parts)


def _error_of_peers(ranks: list[int], text: str) -> PayloadError:
    return PayloadError(f"MRR802: the routes of requests cannot be fetched; rank {ranks[0]}: {text}")


def _queries(pieces: Sequence[Piece], layers: tuple[int, ...], engines: Sequence[Any], me: int) -> dict[int, _Query]:
    """Return rank -> this rank's request for its rows.

    Args:
        pieces, layers: that this rank needs.
        engines: by rank: its engine, and the layer numbers of its routers.

    Raises:
        PayloadError: no rank of an engine has a layer.
    """
    queries = {}
    for engine in dict.fromkeys(piece.ticket.engine for piece in pieces):
        numbers = [i for i, piece in enumerate(pieces) if piece.ticket.engine == engine and piece.end > piece.begin]
        rows = tuple((pieces[i].ticket.request_id, pieces[i].begin, pieces[i].end) for i in numbers)
        taken: dict[int, list[int]] = {}
        for layer in layers:
            # Tensor-parallel ranks of an engine have the same routes: take this rank's own, else spread the work by `me`.
            ranks = [rank for rank, (own, has) in enumerate(engines) if own == engine and layer in has]
            if not ranks:
                raise PayloadError(
                    f"MRR802: layer {layer} of the trained model has no routes: the engine whose first rank is {engine} "
                    f"records the layers {sorted({each for own, has in engines if own == engine for each in has})}."
                )
            taken.setdefault(me if me in ranks else ranks[me % len(ranks)], []).append(layer)
        for rank, part in taken.items():
            places = tuple(map(engines[rank][1].index, part))
            queries[rank] = _Query(places, tuple(map(layers.index, part)), tuple(numbers), rows)
    return queries


def _exchange(sent: Sequence[Tensor], sizes: Sequence[Sequence[int]], me: int) -> list[Tensor]:
    """Send bytes to each rank, in messages of limited size; return those from each rank.

    Args:
        sent: by rank.
        sizes: sizes[a][b] bytes go to rank a from rank b.
    """
    from megatron_router_replay.mcore.core.streams import collective_device

    world = len(sent)
    received = [torch.empty(sizes[me][rank], dtype=torch.uint8) for rank in range(world)]
    received[me] = sent[me]
    step = max(1, _MESSAGE_BYTES // world)
    longest = max((size for a, row in enumerate(sizes) for b, size in enumerate(row) if a != b), default=0)
    device = collective_device(None)
    for start in range(0, longest, step):
        outgoing = [part[start : start + step] if rank != me else part[:0] for rank, part in enumerate(sent)]
        incoming = [part[start : start + step] if rank != me else part[:0] for rank, part in enumerate(received)]
        message = torch.empty(sum(map(len, incoming)), dtype=torch.uint8, device=device)
        dist.all_to_all_single(
            message, torch.cat(outgoing).to(device), list(map(len, incoming)), list(map(len, outgoing))
        )
        for part, values in zip(incoming, torch.split(message.cpu(), list(map(len, incoming)))):
            part.copy_(values)
    return received
