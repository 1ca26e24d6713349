"""What the ranks of a replay judge together when they leave it, from the numbers that each has told."""

from __future__ import annotations

from typing import Any

from megatron_router_replay.mcore.sessions.report import share_of


def judge(everyone: dict[int, dict[str, Any]], *, least: float | None) -> list[str]:
    """Return what is wrong with a group of ranks as a whole, the same on all of them.

    Args:
        everyone: rank -> the numbers that it told, see `ReplaySession._numbers`.
        least: `min_replayed` of `replay`.
    """
    if len({tuple(numbers["choice"]) for numbers in everyone.values()}) > 1:
        return ["ranks replay with different expert_bias= or aux_loss=: give all of them the same."]
    digests: dict[int, set[int]] = {}
    for numbers in everyone.values():
        digests.setdefault(numbers["loss_group"], set()).add(numbers["padding_digest"])
    uneven = [group for group, found in sorted(digests.items()) if group >= 0 and len(found) > 1]
    if uneven:
        return [
            f"ranks that share an auxiliary loss (those of rank {uneven[0]}) were not told of padding in the same "
            "micro-batches: its parts were divided by different numbers of tokens. Give padding= on all ranks or none."
        ]
    problem = _judge_share(list(everyone.values()), least=least)
    return [] if problem is None else [problem]


def _judge_share(everyone: list[dict[str, Any]], *, least: float | None) -> str | None:
    """Return what is wrong with the share that was replayed, over all ranks: one may rightly have nothing but padding."""
    ranks = "this rank" if len(everyone) == 1 else f"{len(everyone)} ranks"
    counted = (numbers["rows"][:2] + [numbers["left_out"]] + numbers["decisions"] for numbers in everyone)
    replayed, live, left_out, asked, turned_down = (sum(counts) for counts in zip(*counted))
    share = share_of(replayed, live, asked, turned_down)
    # Apart from the share asked for: a session that replays nothing is a mistake, unless somebody said min_replayed=0.
    if share == 0 and replayed and least != 0:
        return (
            f"choose= turned down all {asked} decisions on {ranks}, so nothing was replayed. If it is meant so, "
            "replay(..., min_replayed=0) says it."
        )
    if share == 0 and left_out and least != 0:
        return (
            f"none of {live} tokens was replayed on {ranks}: {left_out} were left out (trace.keep); others have no "
            "route. Is the mask inverted? If it is meant so, replay(..., min_replayed=0) says it."
        )
    if share == 0 and not left_out and not replayed:
        return (
            f"none of {live} tokens was replayed on {ranks}; the trace has no route for any of them, or all rows are -1. "
            "Were the routes lost on the way, or is this another rank's part of a recording (recording.gather)?"
        )
    if least is None or share is None or share >= least:
        return None
    if not all(numbers["padding_known"] for numbers in everyone):
        return (
            f"min_replayed={least} cannot be judged: routes came without padding= or filler=, so rows of padding count "
            "as tokens without a route. Say what is padding, or leave min_replayed out."
        )
    by_choice = f" ({left_out} were left out by trace.keep)" if left_out else ""
    by_choice += f" (choose= turned down {turned_down} of {asked} decisions)" if turned_down else ""
    return (
        f"{share:.4%} of {replayed + live} tokens were replayed on {ranks}, less than min_replayed={least}{by_choice}."
    )
