"""Compare traces and log-probs: diff, facts, page, metrics.

A *decision* is the set of experts that the router of one layer chose for a row (token). Two traces *agree* on a decision
if both name the same set, in any order; otherwise the decision *differs*. (A session's report has an *agreement* of its own:
how much of a replayed route the live router would choose.) A decision's *overlap* is the number of experts that both name,
or its share of topk. Two decisions are *near* if they share more than half of their experts.

Importing this package loads none of its modules.
"""

from typing import TYPE_CHECKING

from megatron_router_replay.lazy import lazy_names

if TYPE_CHECKING:
    from megatron_router_replay.diagnostics.diff import diff_traces
    from megatron_router_replay.diagnostics.metrics import logprob_mismatch

__all__ = ["diff_traces", "logprob_mismatch"]

__getattr__, __dir__ = lazy_names(__name__, {"diff_traces": "diff", "logprob_mismatch": "metrics"})
