"""Decide if the routes of a session are wrong, from what all of its ranks publish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_router_replay.mcore.judge.blocks import EVIDENCE, evidence_of
from megatron_router_replay.mcore.judge.rank_evidence import SHARED_NOISE, Anomaly, RankAgreement, SharedBlock
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


def group_verdict(everyone: Sequence[RankAgreement], least: float) -> Verdict:
    """Return the faults of the routes of a group of ranks.

    Args:
        everyone: of each rank.
        least: `min_agreement` of `replay`; 0: find no faults.
    """
    verdict = Verdict([], [], {})
    if not least:
        return verdict
    layout = sorted({fact for each in everyone for fact in each.layout})
    # Tensor-parallel ranks with the same rows are replicas. Their rows must count once.
    for replica in sorted({each.replica for each in everyone}):
        ranks = [each for each in everyone if each.replica == replica]
        sums = add_up(item for each in ranks for item in each.layers.items())
        layers = agreement_by_layer(dict(sorted(sums.items())))
        for each in ranks:
            if each.wrong_rows:
                verdict.wrong_rows.setdefault(each.trace, []).extend(map(list, each.wrong_rows))
        anomalies = [anomaly for each in ranks for anomaly in each.anomalies]
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


def _add_shared_blocks(ranks: Sequence[RankAgreement], verdict: Verdict) -> list[Anomaly]:
    """Return anomalies of sequences over the ranks that share them; add the rows of those that raise to the verdict."""
    by_name: dict[str, list[tuple[str, SharedBlock]]] = {}
    for each in ranks:
        for part in each.shared_blocks:
            by_name.setdefault(part.name, []).append((each.trace, part))
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
