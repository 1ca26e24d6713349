"""What sessions log, under `megatron_router_replay.mcore.events`: INFO when one begins or ends, WARNING for a low share."""

from __future__ import annotations

import logging

from megatron_router_replay.mcore.report import SessionReport

_LOG = logging.getLogger(__name__)

LOW_SHARE = 0.9
"""Below it a replay session warns: samples of ten tokens and more, each with a live last one, stay above."""


def log_began(kind: str, num_routers: int) -> None:
    """Say that a session has a model's routers under control."""
    _LOG.info("%s session began with %d routers", kind, num_routers)


def log_ended(report: SessionReport) -> None:
    """Say what a session did that ended in order, and warn where it replayed little."""
    _LOG.info(
        "%s session ended: %d micro-batches, %d forwards, %d recomputes, rows %d replayed, %d live, %d padding",
        report.kind,
        report.microbatches,
        report.forwards,
        report.recomputes,
        report.rows_replayed,
        report.rows_live,
        report.rows_padding,
    )
    # What was left live by choice was not lost.
    expected = report.rows_replayed + (report.rows_without_route or 0)
    if report.kind == "replay" and expected and report.rows_replayed / expected < LOW_SHARE:
        _LOG.warning(
            "only %.1f %% of the tokens were replayed (%d of %d); the live router decided the others. Is the field dropped "
            "for some samples on the way? replay(min_replayed=...) makes this an error",
            100 * report.rows_replayed / expected,
            report.rows_replayed,
            expected,
        )
    if report.rows_repeated:
        _LOG.warning(
            "%d rows were named twice in a micro-batch: do routing_rows start anew in each sample? Their tokens share routes",
            report.rows_repeated,
        )


def log_failed(kind: str, error: BaseException) -> None:
    """Say that a session was left by an exception: the routers are released, nothing was verified."""
    _LOG.info("%s session was left by %s; the routers are released, nothing was verified", kind, type(error).__name__)
