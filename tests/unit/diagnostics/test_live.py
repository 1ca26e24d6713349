"""The live comparison: numbers by hand, wrong captures named, no host sync, sums over ranks."""

import json
import math

import pytest
import torch

from megatron_router_replay.diagnostics.live import LiveComparison, merge_live_reports
from megatron_router_replay.errors import ReplayStateError, TraceError

LAYERS, EXPERTS, TOPK, TOKENS = (2, 3, 4, 6), 16, 2, 400


def logits_of(layer, seed=0):
    return torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(100 * seed + layer))


def compared(change=lambda routes: routes, device="cpu"):
    """Replayed routes are those of logits with a little noise, then changed by the test."""
    live = {layer: logits_of(layer) for layer in LAYERS}
    noisy = {layer: (live[layer] + 0.05 * logits_of(layer, 1)).topk(TOPK, dim=1).indices for layer in LAYERS}
    comparison = LiveComparison(LAYERS, num_experts=EXPERTS, topk=TOPK, device=device)
    for layer, routes in change(noisy).items():
        top = live[layer].topk(TOPK, dim=1).indices
        comparison.add(layer, live[layer].to(device), live=top.to(device), replayed=routes.to(device, torch.uint8))
    comparison.end_microbatch()
    return comparison


def test_two_tokens_by_hand():
    comparison = LiveComparison([5], num_experts=4, topk=2)
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [1.0, 0.0, 0.0, 0.0]])
    comparison.add(
        5,
        probabilities.log(),
        live=torch.tensor([[0, 1], [3, 2], [0, 1]]),
        replayed=torch.tensor([[1, 0], [3, 0], [2, 3]]),
        mask=torch.tensor([[True], [True], [False]]),
    )
    comparison.end_microbatch()
    report = comparison.report()
    assert report.rows.tolist() == [2]
    assert report.overlap_counts.tolist() == [[0, 1, 1]]
    assert report.agreement_by_layer.tolist() == [0.5]
    assert report.overlap_by_layer.tolist() == [0.75]
    assert report.probability_live.tolist() == pytest.approx([0.7])
    assert report.probability_replayed.tolist() == pytest.approx([(0.7 + 0.5) / 2])
    assert report.load_live.tolist() == [[1, 1, 1, 1]]
    assert report.load_replayed.tolist() == [[2, 1, 0, 1]]
    assert (report.tokens, report.tokens_agree) == (2, 1)
    assert report.metrics()["router_replay/live/imbalance_replayed"] == pytest.approx(2.0)


def test_a_token_agrees_if_it_does_in_every_layer_of_its_micro_batch():
    comparison = LiveComparison([1, 2], num_experts=4, topk=1)
    scores, live = torch.zeros(3, 4), torch.tensor([[0], [1], [2]])
    for key, wrong in ((0, 0), (1, 2)):  # two chunks at once; each is wrong in one token of another layer
        other = live.clone()
        other[wrong] = 3
        comparison.add(1, scores, live=live, replayed=other, key=key)
    for key in (0, 1):
        comparison.add(2, scores, live=live, replayed=live, key=key)
        comparison.end_microbatch(key)
    assert (comparison.report().tokens, comparison.report().tokens_agree) == (6, 4)


def test_engines_that_differ_in_near_ties_are_no_finding():
    report = compared().report()
    assert report.findings == ()
    assert 0.8 < float(report.agreement_by_layer.min()) < 1.0
    assert float((report.probability_live - report.probability_replayed).max()) < 0.01


def test_a_layer_that_lost_its_data_is_named():
    report = compared(lambda routes: routes | {3: torch.tensor([[0, 1]]).expand(TOKENS, 2)}).report()
    (finding,) = report.findings
    assert (finding.kind, finding.layer_numbers) == ("layer_constant", (3,))


def test_swapped_layers_are_named():
    report = compared(lambda routes: routes | {3: routes[6], 6: routes[3]}).report()
    assert [(finding.kind, finding.layer_numbers) for finding in report.findings] == [
        ("layer_outlier", (3,)),
        ("layer_outlier", (6,)),
    ]


def test_shifted_rows_are_one_finding():
    report = compared(lambda routes: {layer: part.roll(1, 0) for layer, part in routes.items()}).report()
    (finding,) = report.findings
    assert "in every layer" in str(finding)


def test_a_router_that_sends_all_tokens_to_the_same_experts_is_no_finding():
    comparison = LiveComparison([1], num_experts=4, topk=2)
    same = torch.tensor([[0, 1]]).expand(100, 2)
    comparison.add(1, torch.zeros(100, 4), live=same, replayed=same)
    assert comparison.report().findings == ()


def test_nothing_compared_is_nan_and_none_and_prints():
    report = LiveComparison([1, 2], num_experts=4, topk=2).report()
    assert math.isnan(report.agreement_by_layer[0])
    assert report.to_dict()["agreement"] == [None, None]
    assert json.loads(json.dumps(report.to_dict()))["tokens"] == 0
    assert all(value == value for value in report.metrics().values())
    assert report.metrics().keys() == compared().report().metrics().keys()
    assert "live router" in str(report)


def test_sigmoid_scores_with_a_bias_have_probabilities_too():
    comparison = LiveComparison([1], num_experts=4, topk=2)
    scores = torch.tensor([[0.9, 0.6, -0.1, 0.0]])
    comparison.add(1, scores, live=torch.tensor([[0, 1]]), replayed=torch.tensor([[0, 2]]), kind="probabilities")
    report = comparison.report()
    assert report.probability_live.tolist() == pytest.approx([1.0])
    assert report.probability_replayed.tolist() == pytest.approx([0.6])


def test_every_nth_micro_batch():
    comparison = LiveComparison([1], num_experts=4, topk=2, every_n=3)
    assert [comparison.wants(i) for i in range(7)] == [True, False, False, True, False, False, True]
    with pytest.raises(TraceError, match="every_n=0"):
        LiveComparison([1], num_experts=4, topk=2, every_n=0)


def test_shapes_and_layers_are_checked():
    comparison = LiveComparison([1], num_experts=4, topk=2)
    routes = torch.tensor([[0, 1]])
    with pytest.raises(ReplayStateError, match="layer 2 is none"):
        comparison.add(2, torch.zeros(1, 4), live=routes, replayed=routes)
    with pytest.raises(ReplayStateError, match="do not fit top-2 of 4"):
        comparison.add(1, torch.zeros(2, 4), live=routes, replayed=routes)


def test_stages_merge_to_one_report():
    whole = compared()
    stages = [LiveComparison(layers, num_experts=EXPERTS, topk=TOPK) for layers in ((3, 6), (2, 4))]
    for stage in stages:
        for layer in stage.layer_numbers:
            scores = logits_of(layer)
            noisy = (scores + 0.05 * logits_of(layer, 1)).topk(TOPK, dim=1).indices
            stage.add(layer, scores, live=scores.topk(TOPK, dim=1).indices, replayed=noisy)
        stage.end_microbatch()
    merged, expected = merge_live_reports([stage.report() for stage in stages]).to_dict(), whole.report().to_dict()
    assert merged.pop("tokens_agree") >= expected.pop("tokens_agree")
    assert merged == expected
    with pytest.raises(TraceError, match="a layer twice"):
        merge_live_reports([stages[0].report()] * 2)


def half_on_each_rank(rank_count: int) -> dict[str, object]:
    import torch.distributed as dist

    comparison = LiveComparison(LAYERS, num_experts=EXPERTS, topk=TOPK)
    mine = slice(dist.get_rank() * TOKENS // rank_count, (dist.get_rank() + 1) * TOKENS // rank_count)
    for layer in LAYERS:
        scores = logits_of(layer)
        noisy = (scores + 0.05 * logits_of(layer, 1)).topk(TOPK, dim=1).indices
        comparison.add(layer, scores[mine], live=scores.topk(TOPK, dim=1).indices[mine], replayed=noisy[mine])
    comparison.end_microbatch()
    dist_sum = comparison.report(dist.group.WORLD, None).to_dict()
    return {"sum": dist_sum, "own rows": comparison.report().rows.tolist()}


def test_ranks_add_up_to_the_whole_and_keep_their_own_sums(workers_2):
    expected = compared().report().to_dict()
    for rank in workers_2.run(half_on_each_rank, 2):
        assert rank["own rows"] == [TOKENS // 2] * 4
        for name, value in expected.items():
            assert rank["sum"][name] == pytest.approx(value) if name != "findings" else rank["sum"][name] == value


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_nothing_waits_for_the_device_until_the_report():
    compared(device="cuda")  # kernels loaded
    inputs = {layer: logits_of(layer).cuda() for layer in LAYERS}
    routes = {layer: scores.topk(TOPK, dim=1).indices for layer, scores in inputs.items()}
    comparison = LiveComparison(LAYERS, num_experts=EXPERTS, topk=TOPK, device="cuda")
    mask = torch.ones(TOKENS, 1, dtype=torch.bool, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for layer in LAYERS:
            comparison.add(layer, inputs[layer], live=routes[layer], replayed=routes[layer].to(torch.uint8), mask=mask)
        comparison.end_microbatch()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert comparison.report().agreement_by_layer.tolist() == [1.0] * 4
