"""Find the trace rows of a forward's tokens by the call of a model chunk.

`read_inputs` takes the ids out of the call; a `Follower` finds their rows with the trace's index. `index.locate` finds the
sample of each segment. A `Follower` also checks all forwards of a session together: padding is one token, and equal
samples have like routes.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_router_replay.checks import as_integers
from megatron_router_replay.errors import LayoutError, ReplayStateError, TraceError
from megatron_router_replay.mcore.batches.index import (
    Located,
    Partition,
    Places,
    PrefixIndex,
    cut_samples,
    locate,
)
from megatron_router_replay.mcore.core.streams import collective_device, to_device
from megatron_router_replay.trace import RoutingTrace

_LOG = logging.getLogger(__name__)

DEVICE_BYTES = 1 << 30
"""The most that an index and one stage's routes may take on a GPU; a larger trace stays on the host."""

_WINDOW = 128
"""Positions over which the routes of equal samples are compared."""

_NOISE = 0.25
"""The share of decisions in which two runs of an engine over the same tokens may differ.

Captures of real engines differ in 0 of 5,404 decisions at equal prefixes. Engine and trainer have different kernels; they
differ in 3 % of a tiny model's decisions and about 10 % of a large one's. Unrelated texts differ in nearly all.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardInputs:
    """The arguments of a chunk's forward from which its tokens are read.

    Args:
        input_ids: [b, s] integers; None: the call has none.
        packed_seq_params: Megatron's PackedSeqParams; None: a padded batch.
        padding_mask: bool, True: padding; None: not given.
        position_ids: [b, s] integers; None: not given, or of another shape.
    """

    input_ids: Tensor | None
    packed_seq_params: Any = None
    padding_mask: Tensor | None = None
    position_ids: Tensor | None = None

    @property
    def bounds(self) -> Tensor | None:
        """Return the starts of packed sequences with padding; None: a padded batch."""
        # Positions of input_ids count padding, so the padded bounds come first.
        names = ("cu_seqlens_q_padded", "cu_seqlens_q")
        return next((each for name in names if (each := getattr(self.packed_seq_params, name, None)) is not None), None)

    @property
    def unpadded_bounds(self) -> Tensor | None:
        """Return the starts without padding; None: not known."""
        packed = self.packed_seq_params
        if packed is None or getattr(packed, "cu_seqlens_q_padded", None) is None:
            return None
        unpadded: Tensor | None = packed.cu_seqlens_q
        # The same tensor twice has no information on padding.
        return None if unpadded is packed.cu_seqlens_q_padded else unpadded


@lru_cache(maxsize=16)  # every micro-batch reads the same signature
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(forward)


def read_inputs(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> ForwardInputs:
    """Return the ForwardInputs of a call of a module, by name or by position."""
    signature = _signature(type(module).forward)
    try:
        named = signature.bind_partial(module, *args, **kwargs).arguments
    except TypeError:  # the forward itself raises it
        named = dict(kwargs)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named = named | named.get(name, {})
    ids, position_ids = named.get("input_ids"), named.get("position_ids")
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_nested or ids.dim() not in (1, 2):
        ids = None
    if ids is not None and ids.dim() == 1:
        ids = ids.unsqueeze(0)
    # Of another shape, such as M-RoPE's [3, b, s], `Places.cut` cannot read them.
    if not isinstance(position_ids, Tensor) or ids is None or position_ids.shape != ids.shape:
        position_ids = None
    return ForwardInputs(
        input_ids=ids,
        packed_seq_params=named.get("packed_seq_params"),
        padding_mask=named.get("padding_mask"),
        position_ids=position_ids,
    )


def context_parallel_group(module: nn.Module, packed: Any) -> dist.ProcessGroup | None:
    """Return the ranks that share a forward's sequences; None: this rank has all.

    Raises:
        LayoutError: the size of the group changes from micro-batch to micro-batch, and the group is not given.
    """
    group, size = getattr(packed, "cp_group", None), getattr(packed, "local_cp_size", None)
    # Megatron's dynamic context parallelism: the model's group has another size than this micro-batch's.
    if size is not None and group is None and int(size) != 1:
        raise LayoutError(
            f"MRR204: packed_seq_params have local_cp_size={int(size)} and no cp_group: which ranks share these sequences is "
            "not known. Set packed_seq_params.cp_group."
        )
    if group is None and size is None:
        collection = getattr(module, "pg_collection", None)
        group = getattr(collection, "cp", None) if collection is not None else getattr(module, "cp_group", None)
        if group is None and collection is None and parallel_state.is_initialized():
            group = parallel_state.get_context_parallel_group(check_initialized=False)
    return None if group is None or group.size() == 1 else group


def received_shape(module: nn.Module) -> tuple[int, int] | None:
    """Return [b, s] of a later stage's hidden states; None: this stage embeds tokens."""
    hidden = getattr(getattr(module, "decoder", None), "input_tensor", None)  # [s, b, h]
    if getattr(module, "pre_process", True) or not isinstance(hidden, Tensor):
        return None
    config: Any = module.config
    # Sequence parallelism splits s over the tensor-parallel ranks.
    split = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return int(hidden.shape[1]), int(hidden.shape[0]) * split


def index_of(trace: RoutingTrace) -> PrefixIndex:
    """Return the PrefixIndex of a trace, which is made once and kept with it.

    Raises:
        TraceError: the trace has no token ids, or no samples, or tokens of some rows are unknown.
    """
    trace.check_unchanged()  # else a kept index may be of former tokens
    if "index" not in trace.derived:
        missing = [name for name in ("token_ids", "sequence_lengths") if getattr(trace, name) is None]
        if missing:
            raise TraceError(
                f"MRR424: cannot find rows by tokens: the trace has no {' and no '.join(missing)}. Make it with "
                "RoutingTrace.from_samples, or queue rows with session.microbatch(rows, model)."
            )
        assert trace.token_ids is not None, "checked above"
        assert trace.sequence_lengths is not None, "checked above"
        if trace.num_tokens and int(trace.token_ids.min()) < 0:
            raise TraceError(
                f"MRR108: cannot find rows by tokens: {int((trace.token_ids < 0).sum())} rows of the trace have no token id. "
                "Another rank routed them: join the parts with recording.gather() or merge_traces."
            )
        trace.derived["index"] = PrefixIndex(trace.token_ids, trace.sequence_lengths)
    index: PrefixIndex = trace.derived["index"]
    return index


def on_device(trace: RoutingTrace, layer_numbers: Sequence[int], device: torch.device) -> RoutingTrace | None:
    """Return layers of a trace and its index on a GPU; None: above `DEVICE_BYTES`."""
    index, kept = index_of(trace), trace.select_layers(layer_numbers)
    assert trace.token_ids is not None, "it has an index"
    row_bytes = kept.num_layers * kept.topk * kept.topk_indices.element_size()
    if index.nbytes + trace.token_ids.nbytes + row_bytes * trace.num_tokens > DEVICE_BYTES:
        return None
    # Kept with the trace: all sessions share the copies, and all chunks share the index.
    key = (device, tuple(layer_numbers))
    if key not in trace.derived:
        if (device, "index") not in trace.derived:
            trace.derived[device, "index"] = index.to(device)
        moved = kept.to(device)
        moved.derived["index"] = trace.derived[device, "index"]
        trace.derived[key] = moved
    shared: RoutingTrace = trace.derived[key]
    return shared


class FoundRows(NamedTuple):
    """The rows of a forward on this rank.

    Args:
        rows: [b, s] int64, -1: none.
        padding: [b, s] bool; None: there is none.
        tokens: [b, s] integers, in the layout of the rows; None: the stage was given another layout.
        rivals: how many segments several samples fit, an int or a scalar on the device.
    """

    rows: Tensor
    padding: Tensor | None
    tokens: Tensor | None
    rivals: Tensor | int


class TokenReader:
    """Read the segments and tokens of forwards over all context-parallel ranks.

    Args:
        padding_token_ids: the tokens of padding; None: not declared.
        cp_partition_mode: how context-parallel ranks share sequences; None: that of packed_seq_params, else zigzag.
    """

    def __init__(self, *, padding_token_ids: Sequence[int] | None, cp_partition_mode: Partition | None) -> None:
        if cp_partition_mode not in (None, "zigzag", "contiguous"):
            raise LayoutError(f"MRR101: cp_partition_mode={cp_partition_mode!r} must be 'zigzag' or 'contiguous'.")
        self._padding: Tensor | None = None
        if padding_token_ids is not None:
            # torch would make a float tensor of an empty list.
            given = padding_token_ids if len(padding_token_ids) else torch.empty(0, dtype=torch.int64)
            self._padding = as_integers(given, "padding_token_ids").reshape(-1).to(torch.int64)
        self._partition: Partition | None = cp_partition_mode

    def padding_on(self, device: torch.device) -> Tensor | None:
        """Return the declared padding tokens on a device; None: none are."""
        return None if self._padding is None else to_device(self._padding, device)

    def places_of(self, inputs: ForwardInputs, shape: tuple[int, int], size: int, device: torch.device) -> Places:
        """Return the Places of a forward, without lengths of a padding mask.

        Args:
            shape: [b, s] of this rank.
            size: of the context-parallel group.
        """
        partition: Any = self._partition or getattr(inputs.packed_seq_params, "cp_partition_mode", None) or "zigzag"
        chunk = getattr(inputs.packed_seq_params, "zigzag_cp_min_chunk_size", None)
        if partition not in ("zigzag", "contiguous") or (size > 1 and chunk):
            raise LayoutError(
                f"MRR204: cannot place the positions of context-parallel ranks under cp_partition_mode={partition!r}, "
                f"zigzag_cp_min_chunk_size={chunk}: supported are 'zigzag' without a chunk size and 'contiguous'."
            )
        bounds, unpadded = inputs.bounds, inputs.unpadded_bounds
        if bounds is None:
            return Places.padded(shape, device=device, cp_size=size, partition=partition)
        if shape[0] != 1:
            raise LayoutError(f"MRR201: packed sequences come as input_ids [1, total], got {list(shape)}.")
        unpadded = None if unpadded is None else unpadded.to(device)
        return Places.packed(shape, bounds.to(device), unpadded=unpadded, cp_size=size, partition=partition)

    def lay_out(
        self, inputs: ForwardInputs, group: dist.ProcessGroup | None, size: int, device: torch.device
    ) -> tuple[Places, Tensor]:
        """Return the Places of a forward, and the tokens of all ranks in flat order."""
        ids = inputs.input_ids
        assert ids is not None, "checked"
        # Packed sequences have bounds, so position_ids cut rows of a padded batch alone.
        mask, positions = inputs.padding_mask, inputs.position_ids if inputs.bounds is None else None
        if mask is not None and mask.numel() != ids.numel():
            mask = None  # of another layout than the tokens
        places = self.places_of(inputs, (int(ids.shape[0]), int(ids.shape[1])), size, device)
        given = [each for each in (ids, mask, positions) if each is not None]
        if group is None:
            columns = [each.reshape(1, -1).to(device) for each in given]
        else:
            # One collective, of 4 to 12 bytes a token: then every rank has whole sequences, and all decide alike.
            sent = torch.stack([each.reshape(-1).to(torch.int32) for each in given]).to(collective_device(group))
            parts = [torch.empty_like(sent) for _ in range(size)]
            dist.all_gather(parts, sent.contiguous(), group=group)
            columns = list(torch.stack(parts, dim=1).to(device))
        flat = [places.in_order(each) for each in columns]
        if positions is not None:
            places = places.cut(flat[-1])
        if mask is not None:
            places = places.bound(flat[1] != 0)
        return places, flat[0]


def number_tokens(
    reader: TokenReader, module: nn.Module, inputs: ForwardInputs, where: str, check: Callable[..., None]
) -> tuple[Tensor, Tensor]:
    """Number the tokens of a recorded forward in the order of its samples.

    Returns:
        The numbers on this rank, [b, s] int64 from 0, -1: padding; and the length of each segment's sample, [S].

    Raises:
        ReplayStateError: the call has no ids, or this stage has them in another layout than its hidden states.
        LayoutError: sequences end or begin with equal tokens, which may be padding.
    """
    ids, shape = inputs.input_ids, received_shape(module)
    if ids is None or (shape is not None and shape != tuple(ids.shape)):
        given = "no input_ids" if ids is None else f"input_ids {list(ids.shape)} for hidden states {list(shape or ())}"
        raise ReplayStateError(
            f"MRR424: {where}: {type(module).__name__} got {given}, so the tokens that it routes are not known. Pass the "
            "ids of the first stage to every pipeline stage, or queue rows [b, s] with recording.microbatch(rows, model)."
        )
    group = context_parallel_group(module, inputs.packed_seq_params)
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    places, tokens = reader.lay_out(inputs, group, size, ids.device)
    start, stop, is_doubtful = cut_samples(tokens, places, padding_token_ids=reader.padding_on(ids.device))
    # A padding token in a sample, or a sample without its last token, would make a wrong trace: the caller must decide.
    check(
        is_doubtful.any(),
        f"MRR207: {where}: sequences begin or end with several equal tokens, so a recording cannot tell padding from "
        "samples. Give the model padding_mask or unpadded cu_seqlens_q, or say mrr.record(..., padding_token_ids=[...]), "
        "where [] says that there is no padding.",
    )
    # +1 at a sample's start, -1 at its end: the cumulative sum is 1 inside of samples.
    edges = torch.zeros(tokens.numel() + 1, dtype=torch.int64, device=tokens.device)
    edges = edges.index_add_(0, start, torch.ones_like(start)).index_add_(0, stop, -torch.ones_like(stop))
    is_token = edges.cumsum(0)[:-1] > 0
    numbers = torch.where(is_token, is_token.cumsum(0) - 1, -1)
    return places.of_rank(numbers, rank), stop - start


class Follower(TokenReader):
    """Find the trace rows of a session's forwards.

    Args:
        trace: of the session.
        padding_token_ids: the tokens of padding; None: padding is one token, the same in all forwards.
        cp_partition_mode: how context-parallel ranks share sequences; None: that of packed_seq_params, else zigzag.
        check: raises at once on the CPU, at the end of the session on a GPU.
    """

    def __init__(
        self,
        trace: RoutingTrace,
        *,
        padding_token_ids: Sequence[int] | None,
        cp_partition_mode: Partition | None,
        check: Callable[..., None],
    ) -> None:
        super().__init__(padding_token_ids=padding_token_ids, cp_partition_mode=cp_partition_mode)
        self._trace = trace
        self._check = check
        self._token: Tensor | None = None  # on a GPU, the padding token that was seen, [1], -1: none
        self._evidence = PaddingEvidence()
        self._waiting: list[tuple[_Forward, Located]] = []  # on a GPU, forwards that `problems` checks at the end
        self._compared: set[tuple[int, int, int]] = set()
        self._has_warned = False

    def find(self, module: nn.Module, inputs: ForwardInputs, trace: RoutingTrace, where: str) -> FoundRows:
        """Return the FoundRows of a forward.

        Args:
            module: the innermost chunk.
            trace: some layers of the session's trace, on the device where rows are gathered.
            where: the rank, chunk and micro-batch, for messages.

        Raises:
            ReplayStateError: the call has no ids.
            LayoutError: tokens are of no sample of the trace.
        """
        ids = inputs.input_ids
        if ids is None:
            raise ReplayStateError(
                f"MRR424: {where}: {type(module).__name__} got no input_ids, so its rows cannot be found. Pass input_ids to "
                "every pipeline stage, open the session on the model that embeds them, or queue rows [b, s] with "
                "session.microbatch(rows, model) before the forward."
            )
        index = trace.derived.get("index") or index_of(self._trace)
        device = index.device
        if device.type == "cpu" and ids.device.type != "cpu" and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "the trace is on the CPU and larger than %d MB, input_ids are on a GPU: the host waits for the GPU once in "
                "every micro-batch",
                DEVICE_BYTES >> 20,
            )
        group, shape = context_parallel_group(module, inputs.packed_seq_params), received_shape(module)
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        # A later stage may get its tokens as they were before packing or splitting: each rank has whole sequences then.
        is_raw = shape is not None and shape != tuple(ids.shape)
        if is_raw:
            raw = ForwardInputs(input_ids=ids, padding_mask=inputs.padding_mask)
            places, tokens = self.lay_out(raw, None, 1, device)
        else:
            places, tokens = self.lay_out(inputs, group, size, device)
        located = locate(index, tokens, places, padding_token_ids=self.padding_on(device))
        if places.overflow is not None:
            self._check(
                places.overflow, f"MRR206: {where}: position_ids restart more often than a forward may have segments."
            )
        forward = _Forward(where, places.shape, is_padded_left=places.start is None)
        live = located.extra + self._judge(located, forward)
        # Read once: where the index is on the host, a second copy of the ids would wait again.
        own = None if is_raw else places.of_rank(tokens, rank)
        if is_raw:
            assert shape is not None, "a later stage"
            places, located, live = self._in_layout(inputs, located, live, shape, size, device, where)
        rows, padding = located.rows(places, live)
        # On a GPU a tensor: an int would need a synchronization.
        num_rivals = located.has_rivals.sum()
        return FoundRows(
            rows=places.of_rank(rows, rank),
            padding=None if padding is None else places.of_rank(padding, rank),
            tokens=own,
            rivals=int(num_rivals) if device.type == "cpu" else num_rivals,
        )

    def _in_layout(
        self,
        inputs: ForwardInputs,
        located: Located,
        live: Tensor,
        shape: tuple[int, int],
        size: int,
        device: torch.device,
        where: str,
    ) -> tuple[Places, Located, Tensor]:
        """Return the samples of a raw batch in the layout that a later stage computes."""
        places = self.places_of(inputs, shape, size, device)
        # Sequences keep their order in both layouts; packed ones have one segment more, of padding.
        missing = places.begin.numel() - live.numel()
        if missing not in (0, 1):
            raise LayoutError(
                f"MRR201: {where}: this pipeline stage was given input_ids of {live.numel()} sequences and computes "
                f"{places.begin.numel()}: pass it the ids as the first stage gets them."
            )
        columns = [torch.nn.functional.pad(each, (0, missing)) for each in located]
        located = Located(*columns)._replace(start=torch.zeros_like(places.begin))
        return places, located, torch.nn.functional.pad(live, (0, missing))

    # ---- checks of segments
    def _judge(self, located: Located, forward: _Forward) -> Any:
        """Check the segments of a forward; return the number of their live tokens.

        On a GPU, the checks run at the end of the session.

        Returns:
            [S] of 0 or 1, or 0 for all.
        """
        # A single token after a whole sample was appended to it, unless it is the padding token.
        is_single = located.is_single
        if is_single.device.type == "cpu":
            segments = located.segments()
            if problem := self._problem_of(forward, segments):
                raise LayoutError(problem)
            if self._padding is not None or not any(each.is_single for each in segments):
                return 0
            return is_single * (located.last != self._evidence.token)
        message = f"MRR206: {forward.where}: a forward got tokens of no sample of the trace"
        self._check((located.is_explained == 0).sum(), f"{message}.", partial(self._unexplained, forward, located))
        self._waiting.append((forward, located))
        if self._padding is not None:
            return 0
        # The GPU's form of `PaddingEvidence`: several tokens in a row after a whole sample, before a sample, or alone are
        # padding. The greatest is used; if there are different ones, `problems` returns an error.
        is_certain = (located.padding > 1) & ((located.is_whole > 0) | (located.count == 0))
        tokens = [torch.where(is_certain, located.last, -1)]
        if forward.is_padded_left:
            tokens.append(torch.where(located.start > 1, located.first, -1))
        tokens.append(torch.full_like(located.first[:1], -1) if self._token is None else self._token)
        self._token = torch.cat(tokens).amax(0, keepdim=True)
        return is_single * (located.last != self._token)

    def _problem_of(self, forward: _Forward, segments: list[Located]) -> str:
        """Return the error text of a forward, "": none so far."""
        if not all(each.is_explained for each in segments):
            return self._unexplained(forward, segments)
        for number, segment in enumerate(segments):
            if segment.has_rivals and (problem := self._unlike_rivals(segment)):
                return f"MRR208: {forward.at(number, segment)}: {problem}"
            if self._padding is not None:
                # Doubt after the sample: `locate` does not explain such a segment.
                doubt = "before" if segment.other_starts else ""
            else:
                doubt = self._evidence.add(segment, forward, number)
            if doubt:
                return f"MRR206: {forward.at(number, segment)}: {self._undecided(doubt, segment)}"
        return "" if self._padding is not None else self._evidence.problem(at_end=False)

    def _unexplained(self, forward: _Forward, found: Located | list[Located]) -> str:
        """Return the error text of the first unexplained segment, "": none."""
        segments = found.segments() if isinstance(found, Located) else found
        numbers = [number for number, each in enumerate(segments) if not each.is_explained]
        if not numbers:
            return ""
        segment = segments[numbers[0]]
        more = f" ({len(numbers) - 1} more sequences of this forward cannot be followed either)" if numbers[1:] else ""
        return f"MRR206: {forward.at(numbers[0], segment)}: {self._describe(segment)}{more}"

    def _describe(self, segment: Located) -> str:
        count, sample = segment.count, self._name(segment.row) if segment.count else ""
        if not count:
            return (
                f"no sample of the trace begins with token {segment.first}, nor with what follows it. Is this batch of "
                "another rollout, or was it cut on the left? An evaluation runs inside `with session.paused():`."
            )
        if self._padding is not None and segment.num_ends > 1:
            return self._undecided("after", segment)
        if segment.extra > 1 and segment.is_whole:
            return (
                f"it holds all {count} tokens of {sample}, and from position {count} on (token {segment.after}) more than "
                "one token that is no padding. If it is padding, give padding_mask to the model, or say "
                "mrr.replay(..., padding_token_ids=[...])."
            )
        if segment.extra > segment.is_whole:
            token_ids = index_of(self._trace).token_ids
            return (
                f"its first {count} tokens are those of {sample}, which has token {int(token_ids[segment.row + count])} at "
                f"position {count}, but it has token {segment.after} there. Were the tokens of the rollout tokenized again, "
                "or changed?"
            )
        return (
            f"{sample} has token {segment.first} before it and token {segment.last} after it, and padding is one token. "
            "Give the model padding_mask, or say mrr.replay(..., padding_token_ids=[...])."
        )

    def _undecided(self, side: str, segment: Located) -> str:
        return (
            f"tokens {side} {self._name(segment.row)} may be padding or may belong to another sample of the trace, which "
            f"also has them (the sequence begins with token {segment.first}). Give the model padding_mask, or unpadded "
            "cu_seqlens_q beside cu_seqlens_q_padded."
        )

    def _name(self, row: int) -> str:
        sample, _ = index_of(self._trace).name(row)
        ids = self._trace.sample_ids
        return f"sample {sample}" + (f" ({ids[sample]!r})" if ids is not None else "")

    def _unlike_rivals(self, segment: Located) -> str:
        """Return how samples of a segment have unlike routes, "": they are alike."""
        # Micro-batches of a rollout repeat prompts: compare each prefix once in a session.
        key = (segment.row, segment.count, segment.is_whole)
        if key in self._compared:
            return ""
        self._compared.add(key)
        first, *rest = index_of(self._trace).rivals(segment.row, segment.count, is_whole=bool(segment.is_whole))
        for other in rest:
            if why := unlike(self._trace, first, other, segment.count):
                return (
                    f"{self._name(first)} and {self._name(other)} of the trace begin with the same {segment.count} tokens, "
                    f"which a forward got, and {why}: which of them it holds, its tokens do not say. Replay them in "
                    "different sessions, or queue rows with session.microbatch(rows, model)."
                )
        return ""

    def problems(self) -> list[str]:
        """Return the error texts that depend on all forwards; this synchronizes a GPU."""
        found = [self._problem_of(forward, located.segments()) for forward, located in self._waiting]
        # The check of a forward raises for segments without an explanation; only `_undecided` has "may belong".
        found = [each for each in found if not each.startswith("MRR206: ") or "may belong" in each]
        return [each for each in [*dict.fromkeys(found), self._evidence.problem(at_end=True)] if each]


class _Forward(NamedTuple):
    """The name of a forward in messages, its [b, s], and if left padding is searched."""

    where: str
    shape: tuple[int, int]
    is_padded_left: bool

    def at(self, number: int, segment: Located) -> str:
        """Return a name for the first token after the known ones of a segment."""
        rank, local = divmod(segment.at, max(1, self.shape[0] * self.shape[1]))
        row, position = divmod(local, max(1, self.shape[1]))
        of_rank = f" of context-parallel rank {rank}" if rank else ""
        return f"{self.where}, input_ids[{row}, {position}]{of_rank}, sequence {number}"


class PaddingEvidence:
    """The tokens that a session's forwards show as padding, where none is declared."""

    def __init__(self) -> None:
        # Each token with its first place. Several in a row before or after samples: it is the padding token.
        self._strong: dict[int, str] = {}
        # One before or after a sample, or where a sequence leaves its sample: it must be the padding token.
        self._weak: dict[int, str] = {}
        # A sample begins with it: it must not be the padding token.
        self._excluded: dict[int, str] = {}
        # Another sample ends before it: another token must be the padding token.
        self._disputed: dict[int, str] = {}

    @property
    def token(self) -> int:
        """Return the padding token that was seen first, -1: none."""
        return next(iter(self._strong), -1)

    def add(self, segment: Located, forward: _Forward, number: int) -> str:
        """Add an explained segment; return the side with doubtful tokens, "": none.

        Doubtful tokens may be padding or belong to a different sample.
        """
        start = segment.start if forward.is_padded_left else 0
        if not (segment.padding or start or segment.other_starts or segment.num_ends):
            return ""
        if start and segment.other_starts:
            return "before"
        where = forward.at(number, segment)
        if segment.other_starts:
            self._excluded.setdefault(segment.first, where)
        if segment.num_ends > segment.is_whole:
            self._disputed.setdefault(segment.last, where)
        if segment.padding > 1 and (segment.is_whole or not segment.count):
            self._strong.setdefault(segment.last, where)
        # A single token after a whole sample may have been appended to it, so it is no evidence.
        elif segment.padding and not (segment.is_whole and segment.padding == 1 and not segment.extra):
            self._weak.setdefault(segment.last, where)
        if start:
            (self._strong if start > 1 else self._weak).setdefault(segment.first, where)
        return ""

    def problem(self, *, at_end: bool) -> str:
        """Return the error text if padding is not one token, "": it is."""
        declare = "Say mrr.replay(..., padding_token_ids=[...]), or give the model padding_mask."
        if len(self._strong) > 1:
            (one, first), (other, second) = list(self._strong.items())[:2]
            return (
                f"MRR207: tokens after samples are no padding: several places of {first} hold token {one}, of {second} token "
                f"{other}, and padding is one token. {declare}"
            )
        known = next(iter(self._strong), None)
        # Before the end, a later forward may still show the padding token.
        for token, where in self._weak.items() if known is not None or at_end else ():
            if token != known:
                seen_as = f"padding is token {known} elsewhere" if known is not None else "no other place shows padding"
                return (
                    f"MRR207: {where}: token {token} stands where a sequence leaves its sample, and {seen_as}, so it is "
                    f"another text than the trace's or padding that cannot be told from it. {declare}"
                )
        for token, where in (self._excluded | self._disputed).items():
            if token == known or (known is None and at_end and token in self._disputed):
                return (
                    f"MRR207: {where}: token {token} may be padding or a part of a sample: the trace has samples with and "
                    "without it. Give the model padding_mask, or unpadded cu_seqlens_q beside cu_seqlens_q_padded"
                    + ("." if token in self._excluded else "; or say mrr.replay(..., padding_token_ids=[...]).")
                )
        return ""


def unlike(trace: RoutingTrace, first: int, other: int, count: int) -> str:
    """Return how `count` rows of two samples differ beyond noise, "": they do not."""
    one, two = slice(first, first + count), slice(other, other + count)
    versions = trace.weight_version
    if versions is not None and not torch.equal(versions[one], versions[two]):
        at = int((versions[one] != versions[two]).nonzero()[0])
        return f"were generated with different weights ({int(versions[first + at])} and {int(versions[other + at])})"
    both = trace.replay_mask[one] & trace.replay_mask[two]
    # Sorted, because the order of a token's experts is no difference.
    routes = [trace.topk_indices[rows].sort(dim=2).values for rows in (one, two)]
    differ = ((routes[0] != routes[1]).any(dim=2) & both.unsqueeze(1)).sum(1)
    # By windows, because equal routes of a long prompt would hide a short part that differs.
    for begin in range(0, count, _WINDOW):
        window = slice(begin, begin + _WINDOW)
        number = int(both[window].sum()) * trace.num_layers
        different = int(differ[window].sum())
        # Three standard deviations above the share, so that a few decisions alone prove nothing.
        if different > _NOISE * number + 3 * (_NOISE * (1 - _NOISE) * number) ** 0.5:
            return f"have different routes ({different} of {number} decisions from position {begin} on)"
    return ""
