"""Cases that every transport must deliver, and the slice of each rank worked out without the package's plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from megatron_router_replay import RoutingTrace
from megatron_router_replay.transport import ParallelLayout, Place

_NAMES = ("topk_indices", "replay_mask", "token_ids", "weight_version")


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: ParallelLayout
    lengths: tuple[int, ...] = (5, 0, 7, 3, 11, 2, 4)
    partition: object = "round_robin"
    num_experts: int = 64
    optional: bool = True
    num_traces: int = 1

    def traces(self, step: int) -> list[RoutingTrace]:
        """The batch as `num_traces` rollout processes have it; token_ids number the rows of the batch."""
        generator, row = torch.Generator().manual_seed(step), 1000 * step
        traces = []
        for lengths in (self.lengths[i :: self.num_traces] for i in range(self.num_traces)):
            num_tokens = sum(lengths)
            scores = torch.rand(num_tokens, 4, self.num_experts, generator=generator)
            traces.append(
                RoutingTrace(
                    topk_indices=scores.topk(4, dim=2).indices,
                    layer_numbers=(2, 3, 5, 6),
                    num_experts=self.num_experts,
                    replay_mask=torch.arange(num_tokens) % 3 != 2,
                    token_ids=torch.arange(row, row + num_tokens) if self.optional else None,
                    weight_version=step if self.optional else None,
                    sequence_lengths=lengths,
                )
            )
            row += num_tokens
        return traces

    def expected(self, step: int, place: Place) -> dict[str, Tensor]:
        """The tensors that a place must have, by plain indexing."""
        traces = self.traces(step)
        lengths = [length for i in range(self.num_traces) for length in self.lengths[i :: self.num_traces]]
        starts = [0, *accumulate(lengths)]
        samples = range(place.dp_rank, len(lengths), self.layout.dp_size)
        if self.partition != "round_robin":
            samples = self.partition[place.dp_rank]  # type: ignore[index]
        rows = [row for i in samples for row in range(starts[i], starts[i + 1])]
        layers = [(2, 3, 5, 6).index(number) for number in self.layout.stage_layers[place.pp_rank]]
        tensors = {
            name: torch.cat([tensors_of(trace)[name] for trace in traces])[rows] for name in tensors_of(traces[0])
        }
        tensors["topk_indices"] = tensors["topk_indices"][:, layers]
        return tensors


_ALL = ((2, 3, 5, 6),)
CASES = {
    "dp3, three workers": Case(layout=ParallelLayout(stage_layers=_ALL, dp_size=3), num_traces=3),
    "dp4, no optional values": Case(layout=ParallelLayout(stage_layers=_ALL, dp_size=4), optional=False),
    "dp2, one without samples": Case(layout=ParallelLayout(stage_layers=_ALL, dp_size=2), partition=((), (4,))),
    "pp2, 300 experts": Case(layout=ParallelLayout(stage_layers=((2,), (3, 5, 6))), num_experts=300),
    "pp2, virtual stages": Case(layout=ParallelLayout(stage_layers=((2, 5), (3, 6)))),
    "pp3, a stage without MoE layers": Case(layout=ParallelLayout(stage_layers=((), (2, 3), (5, 6)))),
    "tp4": Case(layout=ParallelLayout(stage_layers=_ALL, tp_size=4), num_experts=300),
    "tp2 pp2": Case(layout=ParallelLayout(stage_layers=((2, 3), (5, 6)), tp_size=2)),
    "dp2 pp2": Case(layout=ParallelLayout(stage_layers=((2, 3), (5, 6)), dp_size=2), num_traces=2),
    "cp2 tp2 pp2": Case(layout=ParallelLayout(stage_layers=((2,), (3, 5, 6)), cp_size=2, tp_size=2), num_traces=2),
    "dp2, an order of their own": Case(
        layout=ParallelLayout(stage_layers=_ALL, dp_size=2), partition=((6, 0, 2), (5, 3)), num_traces=2
    ),
}
STEPS = 2

Deliver = Callable[[Case], Sequence[Sequence[dict[str, Tensor]]]]
"""case -> [rank][step] the tensors that the rank received."""


def tensors_of(trace: RoutingTrace) -> dict[str, Tensor]:
    """Return copies of the tensors that a trace has."""
    return {name: value.clone() for name in _NAMES if (value := getattr(trace, name)) is not None}


def check_delivery(deliver: Deliver, case: Case) -> None:
    """Every rank's trace of every step equals the slice worked out independently."""
    received = deliver(case)
    assert [len(steps) for steps in received] == [STEPS] * len(case.layout.places())
    for rank, steps in enumerate(received):
        for step, tensors in enumerate(steps):
            expected = case.expected(step, case.layout.place_of(rank))
            assert tensors.keys() == expected.keys(), (rank, step)
            for name, value in expected.items():
                assert tensors[name].dtype == value.dtype, (rank, step, name)
                assert torch.equal(tensors[name], value), (rank, step, name)
