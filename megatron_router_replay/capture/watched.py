"""watch(model): capture what `generate()` of transformers runs, with nothing announced by hand."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megatron_router_replay.capture.capturer import Capturer, check_rows
from megatron_router_replay.capture.forward import as_integers, find_input_module, named_inputs
from megatron_router_replay.capture.routers import CaptureError, find_router_sites
from megatron_router_replay.checks import as_integer
from megatron_router_replay.trace import RoutingTrace


class Watched:
    """The last batch that a model ran inside `watch`: column c of row r is position c of request r."""

    def __init__(self, capturer: Capturer) -> None:
        self._capturer = capturer
        self._batch = 0
        self._unread_mask = ""
        self._forward: AbstractContextManager[None] | None = None
        self._cache: Any = lambda: None

    def trace(
        self,
        sequences: Any,
        attention_mask: Any,
        *,
        pad_token_id: int | None = None,
        eos_token_id: int | Sequence[int] = (),
    ) -> RoutingTrace:
        """Return one sample for each row that `generate` returned, padding left out.

        The last sampled token of a sample was never fed back, so it has no route.

        Args:
            sequences: [batch, length], prompts and sampled tokens.
            attention_mask: [batch, prompt length], as `generate` got it; with num_return_sequences=n, n rows of each prompt.
            pad_token_id: `generate` writes it after the end of a sequence: the pads that end a row are no tokens of it.
            eos_token_id: a sequence ends with the first of these after its prompt, if there is any. Pass it if sequences
                are padded with it.

        Raises:
            CaptureError: the model ran other tokens than these, or hid others, in its last batch: another generate followed,
                or compiled code ran, which calls no hook.
        """
        ids = as_integers(sequences)
        if pad_token_id is not None:  # a tensor would compare to a tensor, which is searched in another way
            pad_token_id = as_integer("pad_token_id", pad_token_id, error=CaptureError)
        if len(ids) != self._batch:
            raise CaptureError(
                f"MRR705: {len(ids)} sequences, but the model ran {self._batch} rows in its last batch: take the trace "
                "before the next generate. Compiled code is not seen, nor is a wrapper whose generate() runs the model "
                "inside it: watch that model (PEFT: get_base_model()). The rows of a beam search are no sequences."
            )
        masks = as_integers(attention_mask) != 0
        # Each sequence needs its own: generate() repeats the mask of a prompt for several sequences of it.
        if ids.ndim != 2 or masks.ndim != 2 or len(masks) != len(ids) or masks.shape[1] > ids.shape[1]:
            raise CaptureError(
                f"MRR704: attention_mask {list(masks.shape)} for sequences {list(ids.shape)}: it must be [batch, prompt "
                "length], a row for each sequence: of num_return_sequences=n, attention_mask.repeat_interleave(n, dim=0)."
            )
        samples, tokens = [], []
        for row, (sequence, in_prompt) in enumerate(zip(ids, masks)):
            columns = np.flatnonzero(_is_token(sequence, in_prompt, pad_token_id, eos_token_id))
            rows = self._capturer._rows(row, len(sequence))
            if (rows["is_written"][: len(in_prompt)] & ~in_prompt).any():
                if self._unread_mask:
                    raise CaptureError(
                        f"MRR704: row {row}: the model's attention_mask, a {self._unread_mask}, cannot be read, so its "
                        "padding is not known: generate without padding, or with attn_implementation='sdpa'."
                    )
                raise CaptureError(
                    f"MRR704: row {row}: the model ran tokens that this attention_mask hides: pass it what you pass here."
                )
            samples.append(rows[columns[:-1]])
            tokens.append(sequence[columns])
            check_rows(f"row {row}, padding left out", samples[-1], tokens[-1], np.ones(len(columns) - 1, bool))
        return self._capturer._trace(samples, np.concatenate(tokens), [len(each) for each in tokens])

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Announce the forward that the model is about to run: the columns after those in its cache."""
        if torch.compiler.is_compiling():
            return
        self._forward = None  # one that raised ends here
        inputs = named_inputs(module, args, kwargs)
        input_ids, mask, cache = (inputs.get(name) for name in ("input_ids", "attention_mask", "past_key_values"))
        if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
            raise CaptureError(
                "MRR705: a forward without input_ids [batch, length] cannot be watched: its tokens are not known."
            )
        batch, length = input_ids.shape
        start = 0 if cache is None else int(cache.get_seq_length())
        if start == 0:  # a new generate(): the rows of the one before are dropped
            for row in range(self._batch):
                self._capturer.abort(row)
            for row in range(batch):
                self._capturer.add_request(row, num_prompt_tokens=length)
            self._batch, self._unread_mask = batch, ""
        elif batch != self._batch:
            raise CaptureError(
                f"MRR705: the model runs {batch} rows with a cache of {self._batch}: a batch must keep its rows."
            )
        positions = np.broadcast_to(np.arange(start, start + length), (batch, length))
        if length > 1 and mask is not None:
            # A prompt: its padding is left out. In later steps every row runs a token.
            is_token = _token_columns(mask, start, length)
            if is_token is None:
                self._unread_mask = type(_mask_of_a_layer(mask)).__name__
            else:
                positions = np.where(is_token, positions, -1)
        # Entered in one hook and left in another: the forward itself runs in between.
        self._forward = self._capturer.forward(range(batch), positions, input_ids=input_ids)
        self._forward.__enter__()

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the announced forward, and let the cache refuse to be reordered: rows then go on in other sequences."""
        if self._forward is None or torch.compiler.is_compiling():
            return
        forward, self._forward = self._forward, None
        forward.__exit__(None, None, None)
        cache = getattr(output, "past_key_values", None)
        if cache is not None and cache is not self._cache():  # generate() passes one cache from step to step
            self.release_cache()
            cache.reorder_cache = _refuse_beams
            self._cache = weakref.ref(cache)

    def release_cache(self) -> None:
        """Give the cache its own method back."""
        cache = self._cache()
        if cache is not None:  # a watch inside this one may have given it back
            vars(cache).pop("reorder_cache", None)


@contextmanager
def watch(model: nn.Module, *, max_num_tokens: int = 8192) -> Iterator[Watched]:
    """Capture the routes of `model.generate(...)` in a `with` block.

    Take the trace of the last call inside the block or after it.

    Args:
        model: a transformers model.
        max_num_tokens: the most token slots of one forward, padding included: batch times prompt length.

    Raises:
        CaptureError: a router cannot be captured, or the tokens of a forward are unknown: beam search, no input_ids.
    """
    module = find_input_module(model)
    if module is None:
        raise CaptureError(f"MRR705: {type(model).__name__} takes no input_ids: announce its forwards to a Capturer.")
    capturer = Capturer(routers=find_router_sites(model), max_num_tokens=max_num_tokens)
    seen = Watched(capturer)
    hooks = [
        module.register_forward_pre_hook(seen.before_forward, with_kwargs=True),
        module.register_forward_hook(seen.after_forward),
    ]
    try:
        yield seen
        capturer.drain()
    finally:
        for hook in hooks:
            hook.remove()
        seen.release_cache()
        capturer._detach()


def _mask_of_a_layer(mask: Any) -> Any:
    """Return the mask itself; of several for different kinds of layers, that of full attention if there is one."""
    return mask.get("full_attention", next(iter(mask.values()), None)) if isinstance(mask, dict) else mask


def _token_columns(mask: Any, start: int, length: int) -> NDArray[np.bool_] | None:
    """Return which columns of a prompt are tokens, [batch, length]; None: the mask is of an unknown kind.

    Args:
        mask: [batch, columns], nonzero on tokens; or [batch, heads, length, columns] as a static cache has it: True or 0.0
            where a query attends; or a dict of these.
        start: the first column of the prompt, after those in the cache.

    Raises:
        CaptureError: the mask hides columns from tokens after them, as a sliding window does.

    Source: transformers 5.23, masking_utils.create_causal_mask, create_masks_for_generate.
    """
    mask = _mask_of_a_layer(mask)
    columns = slice(start, start + length)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        given: NDArray[np.bool_] = as_integers(mask)[:, columns] != 0
        return given
    is_read = isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[2] == length
    if not is_read or not (mask.dtype is torch.bool or mask.is_floating_point()):
        return None
    attends = mask[:, 0, :, columns] if mask.dtype is torch.bool else mask[:, 0, :, columns] == 0
    # Causal attention shows the last query every token of its row. Only two rows of the mask leave the device.
    is_token = attends[:, -1]
    first = is_token.int().argmax(dim=1)
    seen_by_first = attends[torch.arange(len(attends), device=mask.device), first]
    if (seen_by_first & (torch.arange(length, device=mask.device) < first[:, None])).any():
        raise CaptureError(
            "MRR705: attention_mask hides columns from the last token which an earlier one attends to, as in a sliding "
            "window, so its padding is not known: generate with the default cache, or without padding."
        )
    read: NDArray[np.bool_] = is_token.cpu().numpy()
    return read


def _is_token(
    ids: NDArray[np.int64], in_prompt: NDArray[np.bool_], pad_token_id: int | None, eos_token_id: int | Sequence[int]
) -> NDArray[np.bool_]:
    """Return which columns of a row are tokens of its sequence: the prompt without padding, and the sampled tokens."""
    sampled = ids[len(in_prompt) :]
    end = len(sampled)
    if (ends := np.flatnonzero(np.isin(sampled, eos_token_id))).size:
        end = int(ends[0]) + 1
    elif pad_token_id is not None:
        end = int(np.flatnonzero(sampled != pad_token_id).max(initial=-1)) + 1
    return np.concatenate([in_prompt, np.arange(len(sampled)) < end])


def _refuse_beams(*_: Any, **__: Any) -> None:
    raise CaptureError(
        "MRR705: the cache was reordered, as in beam search: a row's routes are then of other sequences. Sample "
        "without beams, or forward the finished sequences once more inside watch."
    )
