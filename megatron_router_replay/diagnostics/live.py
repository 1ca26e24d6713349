"""What the live router would have chosen beside what is replayed: sums on the device while a model trains.

Feed `LiveComparison` with every router's forward under replay; nothing waits for the device until `report()` reads the
sums once. A layer whose replayed routes look as if they were drawn without looking at the tokens is a wrong capture, and
is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_router_replay.diagnostics.fact import Fact, fact_lines, facts_html, imbalance, plain
from megatron_router_replay.errors import ReplayStateError, TraceError, listed
from megatron_router_replay.tables import Table

_MIN_ROWS = 32  # of a layer, before it is called wrong: the overlap of fewer is chance
_LOST = 0.35
"""Kappa below which routes have nothing to do with the live router; engines that merely differ in precision reach 0.9."""


class LiveComparison:
    """Sums over routers' forwards: how the live top-k and the replayed one agree, layer by layer.

    Args:
        layer_numbers: layers that this rank will feed.
        num_experts, topk: of the routers.
        device: where the routers run.
        every_n: compare every n-th micro-batch only; `wants` says which.
    """

    def __init__(
        self,
        layer_numbers: Sequence[int],
        *,
        num_experts: int,
        topk: int,
        device: torch.device | str = "cpu",
        every_n: int = 1,
    ) -> None:
        if every_n < 1:
            raise TraceError(f"MRR101: every_n={every_n} must be 1 or more.")
        self.layer_numbers = tuple(layer_numbers)
        self.num_experts, self.topk, self.every_n = num_experts, topk, every_n
        # One buffer, so that ranks reduce it at once; float64 counts beyond the 16 million at which float32 stops.
        self._widths = (1, 1, 1, topk + 1, num_experts, num_experts)
        self._sums = torch.zeros(len(self.layer_numbers), sum(self._widths), dtype=torch.float64, device=device)
        self._tokens = torch.zeros(2, dtype=torch.float64, device=device)  # rows, rows that agree in every layer
        self._agreeing: dict[int, tuple[Tensor, Tensor]] = {}

    def wants(self, microbatch: int) -> bool:
        """Return whether this micro-batch, counted from 0, shall be compared."""
        return microbatch % self.every_n == 0

    def add(
        self,
        layer_number: int,
        scores: Tensor,
        *,
        live: Tensor,
        replayed: Tensor,
        mask: Tensor | None = None,
        kind: Literal["logits", "probabilities"] = "logits",
        key: int = 0,
    ) -> None:
        """Add one forward of one router. No host sync.

        Args:
            scores: [num_tokens, num_experts], the live router's.
            live, replayed: [num_tokens, topk] of any integer dtype, distinct ids in a row.
            mask: [num_tokens] or [num_tokens, 1] bool, True: this row is replayed; None: all are. Padding and rows that
                the live router decides agree by themselves and would flatter the numbers.
            kind: whether scores still need a softmax over the experts.
            key: tells micro-batches that run at the same time apart, such as model chunks.

        Raises:
            ReplayStateError: the layer was not announced, or shapes do not fit.
        """
        if layer_number not in self.layer_numbers:
            raise ReplayStateError(
                f"MRR104: layer {layer_number} is none of those compared: [{listed(self.layer_numbers)}]."
            )
        shape, device = (scores.shape[0], self.topk), scores.device
        if scores.shape[1:] != (self.num_experts,) or live.shape != shape or replayed.shape != shape:
            raise ReplayStateError(
                f"MRR102: layer {layer_number}: scores {list(scores.shape)}, live {list(live.shape)} and replayed "
                f"{list(replayed.shape)} do not fit top-{self.topk} of {self.num_experts} experts."
            )
        with torch.no_grad():
            weight = torch.ones(shape[0], device=device) if mask is None else mask.reshape(-1)
            weight = weight.to(device=device, dtype=torch.float64)
            probabilities = _probabilities(scores.detach(), kind)
            by_live, by_replay = (_one_hot(chosen, self.num_experts, device) for chosen in (live, replayed))
            overlap = (by_live * by_replay).sum(dim=1)
            sums = [
                weight.sum().view(1),
                (weight * (probabilities * by_live).sum(dim=1)).sum().view(1),
                (weight * (probabilities * by_replay).sum(dim=1)).sum().view(1),
                weight @ _one_hot(overlap.unsqueeze(1), self.topk + 1, device).double(),
                *(weight.to(chosen.dtype) @ chosen for chosen in (by_live, by_replay)),
            ]
            self._sums[self.layer_numbers.index(layer_number)] += torch.cat(sums).to(self._sums.device)
            # A token agrees only if it does in every layer of the micro-batch, and layers come one after the other.
            agrees = overlap == self.topk
            before = self._agreeing.get(key)
            self._agreeing[key] = (weight, agrees if before is None else before[1] & agrees)

    def end_microbatch(self, key: int = 0) -> None:
        """Note that all layers of a micro-batch were added; counts the tokens that agree in all of them."""
        ended = self._agreeing.pop(key, None)
        if ended is not None:
            weight, agrees = ended
            self._tokens += torch.stack([weight.sum(), (weight * agrees).sum()]).to(self._tokens.device)

    def report(self, *groups: dist.ProcessGroup | None) -> LiveReport:
        """Return the sums so far, added up over groups of ranks that feed the same layers; waits for the device.

        Args:
            groups: reduced one after the other, such as the tensor-parallel group under sequence parallelism, then the
                data- and context-parallel group. None is left out. Every rank of a group calls it. The sums
                themselves stay this rank's own.
        """
        # A copy: all_reduce writes into it, and this rank's sums go on growing.
        flat = torch.cat([self._sums.reshape(-1), self._tokens])
        for group in groups:
            if group is not None:
                dist.all_reduce(flat, group=group)
        sums, (tokens, tokens_agree) = flat[:-2].view_as(self._sums).cpu(), flat[-2:].tolist()
        rows, by_live, by_replay, overlap, load_live, load_replayed = sums.split(self._widths, dim=1)  # type: ignore[no-untyped-call]
        return LiveReport(
            layer_numbers=self.layer_numbers,
            num_experts=self.num_experts,
            topk=self.topk,
            rows=rows[:, 0].to(torch.int64),
            probability_live=(by_live / rows)[:, 0],
            probability_replayed=(by_replay / rows)[:, 0],
            overlap_counts=overlap.to(torch.int64),
            # Loads were added up in float32 products: rounding gives back the whole numbers that they are.
            load_live=load_live.round().to(torch.int64),
            load_replayed=load_replayed.round().to(torch.int64),
            tokens=int(tokens),
            tokens_agree=int(tokens_agree),
        )


def _one_hot(indices: Tensor, size: int, device: torch.device) -> Tensor:
    hot = torch.zeros(indices.shape[0], size, dtype=torch.float32, device=device)
    return hot.scatter_(1, indices.to(device=device, dtype=torch.int64, non_blocking=True), 1.0)


def _probabilities(scores: Tensor, kind: str) -> Tensor:
    """Return scores [num_tokens, num_experts] as float32 rows that add up to 1."""
    if kind == "logits":
        return torch.softmax(scores.float(), dim=1)
    if kind != "probabilities":
        raise ReplayStateError(f"MRR101: kind={kind!r} must be 'logits' or 'probabilities'.")
    # Sigmoid scores with an expert bias may be negative and add up to anything.
    positive = scores.float().clamp(min=0.0)
    return positive / positive.sum(dim=1, keepdim=True).clamp(min=1e-20)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LiveReport:
    """How the live router and the replayed routes agree, layer by layer; only replayed rows count.

    Args:
        rows: [num_layers] int64, decisions compared.
        probability_live, probability_replayed: [num_layers] float64, mean probability that the live router gives to the
            experts that each names, NaN without rows. Nearly equal: the two differ in near-ties only.
        overlap_counts: [num_layers, topk + 1] int64, decisions by the number of experts that both name.
        load_live, load_replayed: [num_layers, num_experts] int64, tokens of each expert.
        tokens, tokens_agree: tokens compared, and those that agree in every layer of this rank.
    """

    layer_numbers: tuple[int, ...]
    num_experts: int
    topk: int
    rows: Tensor
    probability_live: Tensor
    probability_replayed: Tensor
    overlap_counts: Tensor
    load_live: Tensor
    load_replayed: Tensor
    tokens: int
    tokens_agree: int

    @property
    def agreement_by_layer(self) -> Tensor:
        """Share of decisions that agree, [num_layers] float64, NaN without rows."""
        return self.overlap_counts[:, -1].double() / self.rows

    @property
    def overlap_by_layer(self) -> Tensor:
        """Mean overlap as a share of topk, [num_layers] float64, NaN without rows."""
        shared = torch.arange(self.topk + 1, dtype=torch.float64) / self.topk
        return (self.overlap_counts.double() @ shared) / self.rows

    @property
    def kappa(self) -> Tensor:
        """What is left of the overlap when chance is taken out, [num_layers]: 1 the same, 0 unrelated, NaN without rows.

        Chance is the overlap of routes drawn with the same two expert loads, but for other tokens.
        """
        rows, overlap = self.rows.double().unsqueeze(1), self.overlap_by_layer
        chance = ((self.load_live / rows) * (self.load_replayed / rows)).sum(dim=1) / self.topk
        # Where every token has the same experts, chance explains all of the overlap, and 0 / 0 would call that unrelated.
        return torch.where(overlap > 0.999, torch.ones_like(overlap), (overlap - chance) / (1 - chance).clamp(min=1e-9))

    def _by_layer(self) -> dict[str, Tensor]:
        """Return what is measured of each layer, in the order of the table's columns."""
        return {
            "agreement": self.agreement_by_layer,
            "overlap": self.overlap_by_layer,
            "probability_live": self.probability_live,
            "probability_replayed": self.probability_replayed,
            "imbalance_live": imbalance(self.load_live),
            "imbalance_replayed": imbalance(self.load_replayed),
        }

    @property
    def findings(self) -> tuple[Fact, ...]:
        """Layers whose replayed routes have nothing to do with what the live router sees: wrong captures."""
        kappa, overlap = self.kappa.tolist(), self.overlap_by_layer.tolist()
        enough = [i for i, rows in enumerate(self.rows.tolist()) if rows >= _MIN_ROWS]
        lost = [i for i in enough if kappa[i] < _LOST]
        if len(lost) > 1 and len(lost) == len(enough):
            text = (
                "in every layer the replayed experts are those of the live router no more often than by chance "
                f"({sum(overlap[i] for i in lost) / len(lost):.1%} overlap): rows are shifted, or the routes are of "
                "other tokens or another model."
            )
            return (Fact(kind="layer_outlier", text=text),)
        return tuple(self._finding(i, overlap[i]) for i in lost)

    def _finding(self, index: int, overlap: float) -> Fact:
        constant = int((self.load_replayed[index] > 0).sum()) == self.topk
        number = self.layer_numbers[index]
        return Fact(
            kind="layer_constant" if constant else "layer_outlier",
            layer_numbers=(number,),
            text=f"layer {number}: {overlap:.1%} of its replayed experts are the live router's, no more than by chance: "
            + (
                "every token is sent to the same experts, so its data was lost or zeroed."
                if constant
                else "its routes are of another layer, step or model."
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what was measured as values that `json.dumps` takes; what was not is None."""
        names = ("layer_numbers", "rows", "kappa", "tokens", "tokens_agree")
        values = {name: plain(getattr(self, name)) for name in names} | {
            name: plain(values) for name, values in self._by_layer().items()
        }
        return values | {"findings": [str(finding) for finding in self.findings]}

    def metrics(self, prefix: str = "router_replay/live/") -> dict[str, float]:
        """Return numbers over all layers for a training logger: keys are the same whatever was measured."""
        weights = self.rows.double() / max(1, int(self.rows.sum()))
        values = {name: float((each.nan_to_num() * weights).sum()) for name, each in self._by_layer().items()}
        values["tokens_agree"] = self.tokens_agree / max(1, self.tokens)
        values["layers_wrong"] = float(len(self.findings))
        return {prefix + name: value for name, value in values.items()}

    def table(self) -> Table:
        """Return what is measured, layer by layer."""
        columns = zip(self.layer_numbers, *(values.tolist() for values in self._by_layer().values()))
        return Table(
            name="live",
            head=("layer", "agreement", "overlap", "probability live / replayed", "imbalance live / replayed"),
            rows=[
                (f"{layer}", f"{agreement:.1%}", f"{overlap:.1%}", f"{p:.3f} / {q:.3f}", f"{load:.2f} / {other:.2f}")
                for layer, agreement, overlap, p, q, load, other in columns
            ],
        )

    def _headline(self) -> str:
        return f"live router beside the replayed routes: {self.tokens:,} tokens, {self.tokens_agree:,} agree in every layer"

    def __str__(self) -> str:
        return "\n".join([self._headline(), self.table().text(), *fact_lines(self.findings)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<div>{self._headline()}{self.table().html()}{facts_html(self.findings)}</div>"


def merge_live_reports(reports: Sequence[LiveReport]) -> LiveReport:
    """Return one report of pipeline stages' reports, which hold different layers; tokens are those of the first.

    `tokens_agree` of a model in stages is the smallest of the stages': an upper bound.

    Raises:
        TraceError: no reports, two hold the same layer, or they are of different models.
    """
    with_layers = [report for report in reports if report.layer_numbers]
    if not with_layers:
        raise TraceError("MRR107: cannot merge reports without layers.")
    numbers = [number for report in with_layers for number in report.layer_numbers]
    models = {(report.num_experts, report.topk) for report in reports}
    if len(set(numbers)) != len(numbers) or len(models) != 1:
        raise TraceError(
            f"MRR107: cannot merge live reports of layers {sorted(numbers)}: a layer twice, or other models."
        )
    order = torch.tensor(numbers).argsort()
    names = ("rows", "probability_live", "probability_replayed", "overlap_counts", "load_live", "load_replayed")
    return LiveReport(
        layer_numbers=tuple(sorted(numbers)),
        num_experts=with_layers[0].num_experts,
        topk=with_layers[0].topk,
        tokens=with_layers[0].tokens,
        tokens_agree=min(report.tokens_agree for report in with_layers),
        **{name: torch.cat([getattr(report, name) for report in with_layers])[order] for name in names},
    )
