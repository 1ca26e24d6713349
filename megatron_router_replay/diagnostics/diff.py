"""Two traces -> where routing differs: by layer, by position, by sample, and where b's routes lie in a.

What a decision, agreement and overlap are stands in this package's docstring.

Rows are global names of tokens, so traces recorded under different parallel layouts compare token by token. Traces are
read in blocks: files larger than memory take a few hundred MB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_router_replay.diagnostics.counting import Counter
from megatron_router_replay.diagnostics.facts import find_facts
from megatron_router_replay.diagnostics.source import TraceLike, block_rows, open_source
from megatron_router_replay.diagnostics.trace_diff import TraceDiff
from megatron_router_replay.errors import TraceError

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
    on_rows: Progress | None = None,
) -> TraceDiff:
    """Compare the routes of two traces, token by token.

    Args:
        a, b: traces, files, folders of the ranks' parts of one batch, or lists of these. Rows and layers are matched by
            their global numbers. Decisions are compared in rows that have a route in both; a row with a route in only
            one makes the traces differ in what they cover.
        name_a, name_b: the names of the two in texts.
        step_a, step_b: the step, if a or b is the folder of a `TraceStore` with several steps.
        on_rows: called with the progress.

    Raises:
        TraceError: num_experts or topk differ: traces of different models.
        StoreError: a file or folder is missing, damaged or holds no trace.
    """
    source_a, source_b = open_source(a, name=name_a, step=step_a), open_source(b, name=name_b, step=step_b)
    source_a.name, source_b.name = name_a, name_b
    for name in ("num_experts", "topk"):
        if getattr(source_a, name) != getattr(source_b, name):
            raise TraceError(
                f"MRR107: cannot compare {name_a} with {name}={getattr(source_a, name)} and {name_b} with "
                f"{name}={getattr(source_b, name)}: they are of different models."
            )
    counts = Counter(source_a, source_b)
    total, step = max(source_a.num_tokens, source_b.num_tokens), block_rows(source_a, source_b)
    for start in range(0, total, step):
        stop = min(start + step, total)
        counts.add(start, stop)
        if on_rows is not None:
            on_rows(stop, total)
    return _result(counts)


def _result(counts: Counter) -> TraceDiff:
    a, b, layers, known = counts.a, counts.b, counts.layers, counts.samples.known
    overlap_counts = counts.partial.clone()
    # Decisions that agree are most of all and are not counted one by one.
    overlap_counts[:, -1] = counts.rows_compared - counts.different_by_layer
    differences = counts.differences()
    return TraceDiff(
        name_a=a.name,
        name_b=b.name,
        provenance_a=replace(a.provenance, weight_versions=tuple(sorted(counts.weight_versions_a))),
        provenance_b=replace(b.provenance, weight_versions=tuple(sorted(counts.weight_versions_b))),
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
        overlap_counts=overlap_counts,
        other_order=counts.other_order,
        position_width=counts.width,
        compared_by_position=counts.by_position,
        different_by_position=counts.different_by_position.view(len(layers), counts.bins),
        compared_by_sample=counts.by_sample("rows") * len(layers) if known else None,
        different_by_sample=counts.by_sample("different") if known else None,
        sample_ids=counts.sample_ids,
        # Every cell keeps its first row, so the first of all is among those kept.
        first_by_layer=min(differences, key=lambda found: (found.layer_number, found.row), default=None),
        first_by_row=min(differences, key=lambda found: (found.row, found.layer_number), default=None),
        facts=tuple(find_facts(counts)),
        differences=differences,
    )
