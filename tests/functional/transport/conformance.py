"""What every transport must deliver: cases, and the slice of each rank worked out without the package's plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_router_replay import RoutingTrace
from megatron_router_replay.transport import ParallelLayout, Place


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
        layers, topk = (2, 3, 5, 6), 4
        generator = torch.Generator().manual_seed(step)
        of_workers = [self.lengths[i :: self.num_traces] for i in range(self.num_traces)]
        traces, row = [], 1000 * step
        for lengths in of_workers:
            num_tokens = sum(lengths)
            scores = torch.rand(num_tokens, len(layers), self.num_experts, generator=generator)
            traces.append(
                RoutingTrace(
                    topk_indices=scores.topk(topk, dim=2).indices,
                    layer_numbers=layers,
                    num_experts=self.num_experts,
                    replay_mask=torch.arange(num_tokens) % 3 != 2,
                    token_ids=torch.arange(row, row + num_tokens) if self.optional else None,
                    weight_version=step if self.optional else None,
                    sequence_lengths=lengths,
                )
            )
            row += num_tokens
        return traces

    def all_lengths(self) -> list[int]:
        return [length for i in range(self.num_traces) for length in self.lengths[i :: self.num_traces]]

    def samples(self) -> list[list[int]]:
        """Which samples each data-parallel rank has, by hand where the rule is not round robin."""
        size = self.layout.dp_size
        if self.partition == "round_robin":
            return [[i for i in range(len(self.lengths)) if i % size == rank] for rank in range(size)]
        return [list(samples) for samples in self.partition]  # type: ignore[attr-defined]

    def expected(self, step: int, place: Place) -> dict[str, Tensor]:
        """The tensors that a place must have, by plain indexing."""
        traces = self.traces(step)
        lengths, starts, row = self.all_lengths(), [], 0
        for length in lengths:
            starts.append(row)
            row += length
        rows = [r for i in self.samples()[place.dp_rank] for r in range(starts[i], starts[i] + lengths[i])]
        layers = [traces[0].layer_numbers.index(n) for n in self.layout.stage_layers[place.pp_rank]]
        tensors = {"topk_indices": torch.cat([trace.topk_indices for trace in traces])[rows][:, layers]}
        tensors["replay_mask"] = torch.cat([trace.replay_mask for trace in traces])[rows]
        if self.optional:
            tensors["token_ids"] = torch.cat([trace.token_ids for trace in traces])[rows]  # type: ignore[misc]
            tensors["weight_version"] = torch.full((len(rows),), step, dtype=torch.int32)
        return tensors


_ALL = (2, 3, 5, 6)
CASES = {
    "one rank": Case(layout=ParallelLayout(stage_layers=(_ALL,))),
    "dp2": Case(layout=ParallelLayout(stage_layers=(_ALL,), dp_size=2)),
    "dp3, three workers": Case(layout=ParallelLayout(stage_layers=(_ALL,), dp_size=3), num_traces=3),
    "dp4, no optional values": Case(layout=ParallelLayout(stage_layers=(_ALL,), dp_size=4), optional=False),
    "dp2, samples left out": Case(layout=ParallelLayout(stage_layers=(_ALL,), dp_size=2), partition=((6, 0), (3, 1))),
    "dp2, one without samples": Case(layout=ParallelLayout(stage_layers=(_ALL,), dp_size=2), partition=((), (4,))),
    "pp2, 300 experts": Case(layout=ParallelLayout(stage_layers=((2,), (3, 5, 6))), num_experts=300),
    "pp2, virtual stages": Case(layout=ParallelLayout(stage_layers=((2, 5), (3, 6)))),
    "pp3, a stage without MoE layers": Case(layout=ParallelLayout(stage_layers=((), (2, 3), (5, 6)))),
    "tp2": Case(layout=ParallelLayout(stage_layers=(_ALL,), tp_size=2)),
    "tp4": Case(layout=ParallelLayout(stage_layers=(_ALL,), tp_size=4), num_experts=300),
    "tp2 pp2": Case(layout=ParallelLayout(stage_layers=((2, 3), (5, 6)), tp_size=2)),
    "dp2 pp2": Case(layout=ParallelLayout(stage_layers=((2, 3), (5, 6)), dp_size=2), num_traces=2),
    "cp2 gets whole samples": Case(layout=ParallelLayout(stage_layers=(_ALL,), cp_size=2)),
    "cp2 tp2 pp2": Case(layout=ParallelLayout(stage_layers=((2,), (3, 5, 6)), cp_size=2, tp_size=2), num_traces=2),
    "dp2, samples in an order of their own": Case(
        layout=ParallelLayout(stage_layers=(_ALL,), dp_size=2), partition=((6, 0, 2), (5, 3, 4)), num_traces=2
    ),
}
STEPS = 2

Deliver = Callable[[Case], Sequence[Sequence[dict[str, Tensor]]]]
"""case -> [rank][step] the tensors that the rank received."""


def tensors_of(trace: RoutingTrace) -> dict[str, Tensor]:
    """What a rank reports back, copied."""
    names = ("topk_indices", "replay_mask", "token_ids", "weight_version")
    return {name: value.clone() for name in names if (value := getattr(trace, name)) is not None}


def check_delivery(deliver: Deliver, case: Case) -> None:
    """Every rank's trace of every step equals the slice worked out independently."""
    received = deliver(case)
    assert len(received) == len(case.layout.places())
    for rank, steps in enumerate(received):
        place = case.layout.place_of(rank)
        assert len(steps) == STEPS
        for step, tensors in enumerate(steps):
            expected = case.expected(step, place)
            assert tensors.keys() == expected.keys(), (place, step)
            for name, value in expected.items():
                assert tensors[name].dtype == value.dtype, (place, step, name)
                assert torch.equal(tensors[name], value), (place, step, name)
