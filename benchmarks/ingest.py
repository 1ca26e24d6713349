"""From an engine's response to what the routers of every micro-batch take, beside a plain copy and other ways to do it.

Two legs: *batch*, response -> routes of the whole batch; *targets*, batch -> int64 [tokens of the micro-batch, topk] for
each layer, one micro-batch a sample. verl's own functions run where the environment variable `VERL` names a folder with it:

    pip install --target FOLDER --no-deps verl==0.9.1 tensordict pyvers torchdata
    pip install --target FOLDER cachetools cloudpickle codetiming datasets dill fastapi hydra-core orjson prometheus_client \\
        uvicorn
"""

from __future__ import annotations

import base64
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

import megatron_router_replay as mrr
from benchmarks.measure import Section, ratio, rounds, single_process, table
from benchmarks.router import Routers, random_routes, router_config
from megatron_router_replay.engines.model_info import ModelRoutingInfo
from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.topk import gather_topk

TITLE = "Ingest: an engine's response to the routers' targets"
SAMPLES, TOKENS, LAYERS, EXPERTS, TOPK = 64, 4096, 48, 128, 8
LIST_SAMPLES = 2
"""Samples of the way through Python lists, which is slow."""
REPEATS = 5


class Response:
    """What vLLM 0.22 and later send for a batch: over HTTP, and as python objects.

    Args:
        samples: sequences, of `tokens` each; the last token has no route.
    """

    def __init__(self, samples: int, tokens: int) -> None:
        routes = random_routes(tokens * 4 - 4, LAYERS, TOPK, EXPERTS).to(torch.uint8)
        parts = [routes[(tokens - 1) * (i % 4) : (tokens - 1) * (i % 4 + 1)] for i in range(samples)]
        self.tokens = tokens
        self.ids = [list(range(i, i + tokens)) for i in range(samples)]
        self.arrays = [part.numpy().copy() for part in parts]
        self.payloads = [_encode(array) for array in self.arrays]
        self.num_bytes = sum(array.nbytes for array in self.arrays)

    def decode(self, values: list[Any]) -> mrr.RoutingTrace:
        """Decode with this package, `token_ids` included."""
        info = ModelRoutingInfo(
            num_layers=LAYERS, moe_layer_numbers=tuple(range(1, LAYERS + 1)), num_experts=EXPERTS, topk=TOPK
        )
        half = self.tokens // 2
        responses = [
            {
                "id": f"cmpl-{ids[0]}",
                "prompt_token_ids": ids[:half],
                "choices": [{"token_ids": ids[half:], "routed_experts": value}],
            }
            for ids, value in zip(self.ids, values)
        ]
        return mrr.engines.vllm.decode_batch(responses, model=info)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the straightforward way's batch, [samples, tokens, layers, topk], 0 where there is no route."""
        batch = torch.zeros(len(self.payloads), self.tokens, LAYERS, TOPK, dtype=dtype)
        for sample, payload in enumerate(self.payloads):
            array = np.load(io.BytesIO(base64.b64decode(payload)))
            batch[sample, : len(array)] = torch.from_numpy(array).to(dtype)
        return batch

    def through_lists(self) -> Tensor:
        """Return the same by way of nested Python lists, as a JSON response holds them."""
        rows = [np.load(io.BytesIO(base64.b64decode(payload))).tolist() for payload in self.payloads]
        for sample in rows:
            sample.append([[0] * TOPK] * LAYERS)
        return torch.tensor(rows, dtype=torch.int64)


def _encode(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


class Targets:
    """The second leg: each micro-batch's routes, layer by layer, to the routers of a model."""

    def __init__(self, response: Response) -> None:
        self.samples, self.tokens = len(response.arrays), response.tokens
        self.rows = torch.arange(self.samples * self.tokens).view(self.samples, 1, self.tokens)
        self.model = Routers(router_config("128, 8", num_layers=LAYERS), LAYERS)
        self.scores = torch.zeros(self.tokens, EXPERTS)

    def ours(self, trace: mrr.RoutingTrace) -> None:
        """Queue each micro-batch, and let each router widen its routes and take their scores, as in a forward."""
        with replay_alone(self.model, trace) as session:
            for rows in self.rows:
                session.microbatch(rows)
                self.model(self.scores)

    def dense(self, batch: Tensor) -> None:
        """Take a layer of a sample, make it int64, and take its scores."""
        for sample in batch:
            for layer in range(LAYERS):
                gather_topk(self.scores, sample[:, layer].to(torch.int64).contiguous())


@contextmanager
def replay_alone(model: Routers, trace: mrr.RoutingTrace) -> Iterator[Any]:
    """Open a session in whose forwards, without gradients, Megatron-Core does none of its work on the dense map."""
    from megatron.core.transformer.moe import router as router_module

    # Patched last: a session begins by trying out the function that is there.
    patched = patch.object(router_module, "topk_routing_with_score_function", _take_topk)
    with torch.no_grad(), mrr.replay(model, trace) as session, patched:
        yield session


def _take_topk(logits: Tensor, topk: int, *, router_replay: Any, **_options: Any) -> tuple[Tensor, Tensor]:
    """Stand in for Megatron-Core's routing function: what a session does in it, without the work on the dense map."""
    taken: tuple[Tensor, Tensor] = router_replay.get_replay_topk(logits, topk, default_compute_topk=_live_topk)
    return taken


def _live_topk(scores: Tensor, topk: int, **_groups: None) -> tuple[Tensor, Tensor]:
    return torch.topk(scores, topk, dim=1)


class Verl:
    """verl's functions from a rollout's arrays to its routers' targets, called as its agent loop and engine do.

    Source: verl 0.9.1, experimental.agent_loop.AgentLoopOutput.as_dict, utils.megatron.router_replay_utils, called as in
    workers.engine.megatron.transformer_impl.
    """

    def __init__(self, response: Response, model: Routers) -> None:
        sys.path.append(os.environ["VERL"])
        from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
        from verl.utils.megatron import router_replay_patch, router_replay_utils

        self.utils = router_replay_utils
        half = response.tokens // 2
        self.outputs = [
            AgentLoopOutput(
                prompt_ids=ids[:half],
                response_ids=ids[half:],
                response_mask=[1] * half,
                routed_experts=array,
                metrics=AgentLoopMetrics(),
            )
            for ids, array in zip(response.ids, response.arrays)
        ]
        self.mask = torch.ones(1, half, dtype=torch.int64)
        self.tokens = response.tokens
        self.model = model
        for router in model.routers:
            router.router_replay = router_replay_patch.RouterReplay()

    def batch(self) -> list[Tensor]:
        """Return [tokens, layers, topk] int16 of each sample."""
        return [output.as_dict()["routed_experts"] for output in self.outputs]

    def targets(self, batch: list[Tensor]) -> None:
        """Set the routers' targets, micro-batch by micro-batch; and take their scores, as in a forward."""
        scores = torch.zeros(self.tokens, EXPERTS)
        for routes in batch:
            nested = torch.nested.as_nested_tensor([routes], layout=torch.jagged)
            ids = torch.nested.as_nested_tensor([torch.zeros(self.tokens, dtype=torch.int64)], layout=torch.jagged)
            aligned = self.utils.align_r3_router_replay_data(nested, ids)
            mask = self.utils.build_r3_replay_mask(ids, self.mask)
            self.utils.set_router_replay_data(aligned, None, self.model.config, replay_mask=mask, model=self.model)
            for router in self.model.routers:
                scores.gather(1, router.router_replay.target_topk_idx)
                router.router_replay.clear_indices()


def measure(*, samples: int = SAMPLES, tokens: int = TOKENS, repeats: int = REPEATS) -> dict[str, Any]:
    """Time both legs of every way."""
    with single_process():
        ParallelSizes().initialize()
        response = Response(samples, tokens)
        short = Response(LIST_SAMPLES, tokens)
        targets = Targets(response)
        made: dict[str, Any] = {}

        def keep(name: str, make: Callable[[], Any]) -> Callable[[], None]:
            def run() -> None:
                made[name] = None  # or two batches would be alive at once
                made[name] = make()

            return run

        first = {
            "copy": keep("copy", lambda: [array.copy() for array in response.arrays]),
            "ours, base64": keep("ours", lambda: response.decode(response.payloads)),
            "ours, arrays": keep("ours", lambda: response.decode(response.arrays)),
            "numpy, int64": keep("int64", lambda: response.dense(torch.int64)),
            "numpy, uint8": keep("uint8", lambda: response.dense(torch.uint8)),
        }
        second = {
            "copy": first["copy"],
            "ours": lambda: targets.ours(made["ours"]),
            "numpy, int64": lambda: targets.dense(made["int64"]),
            "numpy, uint8": lambda: targets.dense(made["uint8"]),
        }
        verl = None
        if "VERL" in os.environ:
            verl = Verl(response, Routers(targets.model.config, LAYERS))
            first["verl, arrays"] = keep("verl", verl.batch)
            second["verl"] = lambda: verl.targets(made["verl"])
        lists = {
            "copy": lambda: [array.copy() for array in short.arrays],
            "lists": short.through_lists,
        }
        for way in first.values():
            way()
        assert torch.equal(made["ours"].topk_indices[: tokens - 1], made["uint8"][0, :-1])
        return {
            "bytes": response.num_bytes,
            "list_bytes": short.num_bytes,
            "shape": [samples, tokens, LAYERS, TOPK, EXPERTS],
            "verl": verl is not None,
            "batch": rounds(first, repeats=repeats, warm_up=1),
            "targets": rounds(second, repeats=repeats, warm_up=1),
            "lists": rounds(lists, repeats=max(1, repeats // 2), warm_up=0),
        }


def render(raw: dict[str, Any]) -> str:
    """Return the table."""
    samples, tokens, layers, topk, experts = raw["shape"]

    def cells(leg: str, name: str | None) -> list[str]:
        if name is None:
            return ["", ""]
        if name not in raw[leg]:
            return ["not installed", "not installed"]
        seconds = sorted(raw[leg][name])[len(raw[leg][name]) // 2]
        num_bytes = raw["list_bytes" if leg == "lists" else "bytes"]
        return [f"{ratio(raw[leg], name, 'copy').median:.1f}", f"{num_bytes / 1e6 / seconds:.0f}"]

    ways = [
        ("ours, from base64", ("batch", "ours, base64"), ("targets", "ours"), "8"),
        ("ours, from arrays", ("batch", "ours, arrays"), ("targets", "ours"), "8"),
        ("base64, np.load, dense int64", ("batch", "numpy, int64"), ("targets", "numpy, int64"), "64"),
        ("base64, np.load, dense uint8", ("batch", "numpy, uint8"), ("targets", "numpy, uint8"), "8"),
        (f"base64, lists, dense int64 ({LIST_SAMPLES} samples)", ("lists", "lists"), ("lists", None), "64"),
        ("verl 0.9.1, from arrays", ("batch", "verl, arrays"), ("targets", "verl"), "16"),
        ("copy of the bytes", ("batch", "copy"), ("targets", "copy"), "8"),
    ]
    rows = [[what, *cells(*batch), *cells(*targets), kept] for what, batch, targets, kept in ways]
    head = ["way", "batch / copy", "MB/s", "targets / copy", "MB/s", f"batch, bytes a token and layer (k = {topk})"]
    return "\n".join(
        [
            f"{samples} samples of {tokens} tokens, {layers} layers, top-{topk} of {experts}: {raw['bytes'] / 1e6:.0f} MB of "
            "uint8. *Batch*: response to the routes of the whole batch; ours checks ids, duplicates, constant layers and "
            "tokens on the way, the others check nothing. *Targets*: to each layer's int64 indices and their scores, one "
            "sample a micro-batch; ours with the session's checks. One thread, its processor time; *copy* is of the arrays, "
            "MB of the uint8 routes.",
            "",
            table(head, rows),
        ]
    )


def main() -> Section:
    raw = measure()
    return Section(title=TITLE, text=render(raw), raw=raw)
