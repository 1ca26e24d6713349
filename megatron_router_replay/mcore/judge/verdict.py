"""Decide if the routes of a session are wrong, from what all of its ranks publish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_router_replay.mcore.judge.blocks import EVIDENCE, evidence_of
from megatron_router_replay.mcore.judge.rank_evidence import SHARED_NOISE, Anomaly, SharedBlock
from megatron_router_replay.mcore.judge.sums import Sums, add_up, agreement_by_layer

WARN = 0.5
"""Agreement of a layer below which a session warns."""
LEAST_TO_WARN = 64.0
"""Experts beyond chance from which on a session warns of less than `min_agreement`."""


class Verdict(NamedTuple):
    """Findings of all ranks of a session.

    Args:
        problems: texts that raise.
        warnings: texts that warn of little agreement.
        wrong_rows: name of a trace -> its wrong rows, as [first, stop].
    """

    problems: list[str]
    warnings: list[str]
    wrong_rows: dict[str, list[list[int]]]


def published(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of an `Agreement.summary` that `group_verdict` reads: of 1,024 ranks, one reads all.

    An anomaly that does not raise is for the rank's own report, and of those that raise, the clearest is kept. Six digits of
    a sum are more than a threshold means.
    """
    raising = [each for each in summary["anomalies"] if each[0] >= EVIDENCE]
    layers = {number: [float(f"{value:.6g}") for value in sums] for number, sums in summary["layers"].items()}
    return {**summary, "anomalies": [max(raising)] if raising else [], "layers": layers}


def group_verdict(everyone: Sequence[Mapping[str, Any]], least: float) -> Verdict:
    """Return the faults of the routes of a group of ranks; all ranks compute the same.

    Args:
        everyone: `published(Agreement.summary)` of each rank.
        least: `min_agreement` of `replay`; 0: find no faults.
    """
    verdict = Verdict([], [], {})
    if not least:
        return verdict
    layout = sorted({fact for summary in everyone for fact in summary["layout"]})
    # Tensor-parallel ranks with the same rows are replicas. Their rows must count once.
    for replica in sorted({summary["replica"] for summary in everyone}):
        ranks = [summary for summary in everyone if summary["replica"] == replica]
        sums = add_up((int(layer), unit) for summary in ranks for layer, unit in summary["layers"].items())
        layers = agreement_by_layer(dict(sorted(sums.items())))
        for summary in ranks:
            if summary["wrong_rows"]:
                verdict.wrong_rows.setdefault(summary["trace"], []).extend(summary["wrong_rows"])
        anomalies = [Anomaly(*each) for summary in ranks for each in summary["anomalies"]]
        anomalies += _add_shared_blocks(ranks, verdict)
        raising = [each for each in anomalies if each.evidence >= EVIDENCE]
        if num_low := sum(value < least for value in layers.values()):
            verdict.problems.append(
                f"the live router agrees with the replayed routes by less than min_agreement={least} in {num_low} of "
                f"{len(layers)} layers ({_list(layers)}). Either the routes are of older or other weights: compare their "
                "version with the trainer's. Or they are of other rows or layers: have the engine return token ids, and "
                "compare the trace's layer_numbers with the model's."
                + "".join(f" Or {fact}." for fact in layout)
                + (f" The clearest rows: {max(raising).text}." if raising else "")
            )
        elif raising:
            evidence, text = max(raising)
            verdict.problems.append(
                f"{text}. The log-likelihood ratio is {evidence:.0f}, {EVIDENCE:.0f} raises; report.wrong_rows has the rows "
                "for trace.without_routes."
            )
        elif little := _little(sums, layers, least):
            facts = "".join(f"; {fact}" for fact in layout)
            verdict.warnings.append(
                f"the live router agrees little with the replayed routes: layers {_list(little)}{facts}"
            )
    return Verdict(verdict.problems[:1], verdict.warnings[:1], verdict.wrong_rows)


def _little(sums: Mapping[int, Sums], layers: Mapping[int, float], least: float) -> dict[int, float]:
    """Return the agreement of layers that warn.

    Args:
        layers: those with enough evidence to raise; further layers of `sums` warn where they would raise with more.
    """
    few = {layer: each.agreement_from(LEAST_TO_WARN) for layer, each in sums.items() if layer not in layers}
    little = {layer: value for layer, value in few.items() if value is not None and value < least}
    little |= {layer: value for layer, value in layers.items() if value < WARN}
    return dict(sorted(little.items()))


def _add_shared_blocks(ranks: Sequence[Mapping[str, Any]], verdict: Verdict) -> list[Anomaly]:
    """Return anomalies of sequences over the ranks that share them; add the rows of those that raise to the verdict."""
    by_name: dict[str, list[tuple[str, SharedBlock]]] = {}
    for summary in ranks:
        for values in summary["shared_blocks"]:
            part = SharedBlock(*values)
            by_name.setdefault(part.name, []).append((summary["trace"], part))
    anomalies = []
    for parts in by_name.values():
        by_kind: dict[str, float] = {}
        for kind, value in (item for _, part in parts for item in part.by_kind.items()):
            by_kind[kind] = by_kind.get(kind, 0.0) + value
        # Each rank sent its clearest block, so noise alone rises to SHARED_NOISE on each.
        chosen = SHARED_NOISE * (len(parts) - 1)
        anomaly = Anomaly(
            evidence_of(by_kind.values()) - chosen, max((part.evidence, part.text) for _, part in parts)[1]
        )
        anomalies.append(anomaly)
        if anomaly.evidence >= EVIDENCE:
            for trace, part in parts:
                verdict.wrong_rows.setdefault(trace, []).extend(part.rows)
    return anomalies


def _list(values: Mapping[int, float]) -> str:
    return ", ".join(f"{layer}: {value:.0%}" for layer, value in values.items())
