"""A fault that a comparison recognised, as a record: what, in which layers, samples and rows, and what to do next."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any

from megatron_router_replay.diagnostics.plain import plain_record

ADVICE = {
    "other_tokens": "Compare the batches' token ids: one was filtered, cut or reordered after its routes were taken.",
    "rows_shifted": "Look for a start that is off by one, a missing BOS, or a lost stream chunk where the rows begin.",
    "rows_stuck": "The capture stood still there: discard these rows (replay_mask False), check the engine's kernel.",
    "rows_moved": "Routes and tokens were cut or joined in another order: let routing_rows ride with the tokens.",
    "rows_shuffled": "Let routing_rows go through the same sort, pack or split as the tokens; never rebuild the order.",
    "rows_transposed": "[b, s] was flattened as [s, b] or the other way round: flatten routes and tokens with one code.",
    "rows_unrelated": "Check which request, step and weights these rows are of: nothing in the other trace looks like them.",
    "samples_moved": "Place replies by their request id or index, never by order of arrival.",
    "layers_moved": "Check the map from the engine's layer axis to layer_number: dense layers, pipeline offsets, MTP.",
    "layer_constant": "The layer's data was lost: check that the engine's kernel for this layer records what it chose.",
    "layer_outlier": "Check this layer's weights on both sides, and that its routes are of the same step.",
    "experts_relabelled": "Translate physical to logical ids, or check the checkpoint's expert order.",
    "order_changed": "Nothing is wrong with the sets. Sort the experts of each decision, or compare without --order.",
    "unrelated": "Check that both traces are of the same batch, step and model before you look at anything else.",
}
"""Kind of a finding -> what to do next. The keys are all kinds that there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A fault that a comparison recognised.

    Args:
        kind: a key of `ADVICE`.
        text: one plain sentence.
        layer_numbers: layers of b that it concerns; empty: all.
        rows: first and last row of b that it was seen in; None: all.
        samples: samples of b that these rows belong to; empty: all, or samples are unknown.
        shift: rows_shifted: row r of a is row r + shift of b.
    """

    kind: str
    text: str
    layer_numbers: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None
    samples: tuple[int, ...] = ()
    shift: int | None = None

    @property
    def advice(self) -> str:
        """What to do next, in one sentence."""
        return ADVICE[self.kind]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as values that `json.dumps` takes."""
        return plain_record(self) | {"advice": self.advice}

    def __str__(self) -> str:
        return self.text


def finding_lines(findings: Iterable[Finding]) -> list[str]:
    """Return findings as lines of a text: what each is, and what to do next below it."""
    return [line for finding in findings for line in (f"finding: {finding}", f"  what to do next: {finding.advice}")]


def findings_html(findings: Iterable[Finding]) -> str:
    """Return findings as a list in HTML, empty without any."""
    items = "".join(
        f"<li>{escape(finding.text)}<br><em>What to do next:</em> {escape(finding.advice)}</li>" for finding in findings
    )
    return f'<ul class="findings" id="findings">{items}</ul>' if items else ""
