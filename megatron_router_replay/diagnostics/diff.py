"""Compare two traces: differences by layer and position, and the rows of a that b's routes match.

The package's docstring defines decision, agreement and overlap. Rows are global names of tokens, so traces recorded under
different parallel layouts compare token by token. Files are mapped and read in blocks, so they may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_router_replay.diagnostics.counting import Counter
from megatron_router_replay.diagnostics.facts import find_facts
from megatron_router_replay.diagnostics.source import TraceLike, block_rows, open_source, pair_samples
from megatron_router_replay.diagnostics.trace_diff import TraceDiff
from megatron_router_replay.errors import TraceError
from megatron_router_replay.tables import number_words

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""


def diff_traces(
    a: TraceLike,
    b: TraceLike,
    *,
    name_a: str = "a",
    name_b: str = "b",
    step_a: int | None = None,
    step_b: int | None = None,
    run_a: str | None = None,
    run_b: str | None = None,
    on_rows: Progress | None = None,
) -> TraceDiff:
    """Compare the routes of two traces, token by token.

    Samples are matched by their token ids if both traces have token_ids and sequence_lengths, so the order of a batch does
    not matter; rows are then numbered as in a. Without these, rows are matched by their numbers. Decisions are compared in
    rows with a route in both; a row with a route in only one makes the traces differ in the samples they cover.

    Args:
        a, b: traces, files, folders of the ranks' parts of one batch, or lists of these.
        name_a, name_b: the names of the two in texts.
        step_a, step_b: the step, if a or b is the folder of a `TraceStore` with several steps.
        run_a, run_b: the run, if several runs saved that step.
        on_rows: called with the progress.

    Raises:
        TraceError: num_experts or topk differ: traces of different models.
        StoreError: a file or folder is missing, damaged or has no trace.
    """
    source_a = open_source(a, name=name_a, step=step_a, run=run_a)
    source_b = open_source(b, name=name_b, step=step_b, run=run_b)
    source_a.name, source_b.name = name_a, name_b
    for name in ("num_experts", "topk"):
        if getattr(source_a, name) != getattr(source_b, name):
            raise TraceError(
                f"MRR107: cannot compare {name_a} with {name}={getattr(source_a, name)} and {name_b} with "
                f"{name}={getattr(source_b, name)}: they are of different models."
            )
    pair_samples(source_a, source_b)
    counts = Counter(source_a, source_b)
    total, step = max(source_a.num_tokens, source_b.num_tokens), block_rows(source_a, source_b)
    for start in range(0, total, step):
        stop = min(start + step, total)
        counts.add(start, stop)
        if on_rows is not None:
            on_rows(stop, total)
    return _result(counts)


def _result(counts: Counter) -> TraceDiff:
    a, b, layers = counts.a, counts.b, counts.layers
    overlap_counts = counts.partial.clone()
    # The decisions that agree are the majority and are not counted one by one.
    overlap_counts[:, -1] = counts.rows_compared - counts.different_by_layer
    facts, explained = find_facts(counts)
    unexplained = (counts.alike - torch.from_numpy(explained)).clamp(min=0)
    unexplained[:, -1] = counts.rows_alike - unexplained[:, :-1].sum(dim=1)
    return TraceDiff(
        name_a=a.name,
        name_b=b.name,
        origin_a=_origin(a.origin, counts.weight_versions_a),
        origin_b=_origin(b.origin, counts.weight_versions_b),
        layer_numbers=layers,
        layers_only_a=tuple(number for number in a.layer_numbers if number not in layers),
        layers_only_b=tuple(number for number in b.layer_numbers if number not in layers),
        topk=a.topk,
        num_experts=a.num_experts,
        rows_compared=counts.rows_compared,
        rows_only_a=counts.rows_only_a,
        rows_only_b=counts.rows_only_b,
        rows_other_token=counts.rows_other_token,
        rows_all_same=counts.rows_compared - counts.rows_different,
        rows_alike=counts.rows_alike,
        weight_versions_a=tuple(sorted(counts.weight_versions_a)),
        weight_versions_b=tuple(sorted(counts.weight_versions_b)),
        overlap_counts=overlap_counts,
        unexplained=unexplained,
        other_order=counts.other_order,
        position_width=counts.width,
        compared_by_position=counts.by_position,
        different_by_position=counts.different_by_position.view(len(layers), counts.bins),
        facts=tuple(facts),
        differences=counts.differences(),
    )


def _origin(origin: str, weight_versions: set[int]) -> str:
    # A trace of an asynchronous run may have many versions.
    versions = number_words(sorted(weight_versions), most=4)
    return f"{origin}, weights {versions}" if weight_versions else origin
