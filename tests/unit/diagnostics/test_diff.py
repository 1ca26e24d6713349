"""diff_traces: counts, samples matched by tokens, files and folders, and the text."""

import json
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_router_replay as mrr
from megatron_router_replay.diagnostics import source
from megatron_router_replay.errors import StoreError, TraceError
from megatron_router_replay.store import TraceStore
from tests.unit.store.store_traces import make_trace


def trace_of(indices, layer_numbers=None, num_experts=8, **values):
    indices = torch.as_tensor(indices)
    numbers = layer_numbers or range(1, indices.shape[1] + 1)
    return mrr.RoutingTrace(topk_indices=indices, layer_numbers=numbers, num_experts=num_experts, **values)


def one_line(diff):
    """The text without its line breaks."""
    return " ".join(str(diff).split())


def big_trace(num_tokens=600, **options):
    return make_trace(num_tokens, layer_numbers=(2, 3, 4, 5, 6), topk=2, num_experts=16, **options)


A = trace_of([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 2], [1, 3]]], layer_numbers=(2, 5), sequence_lengths=(1, 2))
B = trace_of([[[0, 1], [2, 3]], [[5, 4], [6, 1]], [[3, 1], [1, 3]]], layer_numbers=(2, 5))


def test_counts_by_layer_and_position_are_those_counted_by_hand():
    diff = mrr.diff_traces(A, B)
    assert diff.rows_compared == 3
    # In layer 2, row 2 shares no expert; in layer 5, row 1 shares expert 6.
    assert diff.overlap_counts.tolist() == [[1, 0, 2], [0, 1, 2]]
    assert diff.other_order.tolist() == [1, 0]  # [4, 5] and [5, 4]
    assert diff.decisions_different == 2
    assert diff.same_by_layer.tolist() == pytest.approx([2 / 3, 2 / 3])
    # Means of overlap: (2 + 2 + 0) / 6 and (2 + 2 + 1) / 6.
    assert re.findall(r"^ +([25]) +1 +66.67 % +(\S+) %", str(diff), re.M) == [("2", "66.67"), ("5", "83.33")]
    assert diff.rows_all_same == 1
    assert diff.compared_by_position.tolist() == [2, 1]
    assert diff.different_by_position.tolist() == [[0, 1], [1, 0]]
    assert diff
    assert not diff.same
    assert not mrr.diff_traces(A, A)
    assert json.loads(json.dumps(diff.to_dict()))["decisions_different"] == 2
    assert max(len(line) for line in str(diff).splitlines()) <= 80


def test_the_first_decisions_that_differ_have_experts_and_tokens():
    a, b = (
        trace._with(token_ids=torch.tensor([5, -1, 7], dtype=torch.int32) + add) for trace, add in ((A, 0), (B, 10))
    )
    diff = mrr.diff_traces(a, b)
    assert [
        (each.layer_number, each.row, each.sample, each.position, each.experts_a, each.experts_b, each.token_a)
        for each in diff.differences
    ] == [(2, 2, 1, 1, (0, 2), (3, 1), 7), (5, 1, 1, 0, (6, 7), (6, 1), None)]
    assert [each.token_b for each in diff.differences] == [17, 9]
    assert (diff.first_by_layer, diff.first_by_row) == diff.differences


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([(1, 4), (2, 8), (3, 8), (6, 64), (8, 300)]),
    st.integers(0, 2**31),
)
def test_overlap_is_that_of_python_sets(num_tokens, num_layers, sizes, seed):
    topk, num_experts = sizes
    options = {"layer_numbers": tuple(range(1, num_layers + 1)), "topk": topk, "num_experts": num_experts}
    a, b = (make_trace(num_tokens, **options, seed=seed + i) for i in (0, 1))
    indices = b.topk_indices.clone()
    indices[::2] = a.topk_indices[::2]
    b = b._with(topk_indices=indices)
    expected = torch.zeros(num_layers, topk + 1, dtype=torch.int64)
    for row_a, row_b in zip(a.topk_indices.tolist(), b.topk_indices.tolist()):
        for layer, (one, other) in enumerate(zip(row_a, row_b)):
            expected[layer, len(set(one) & set(other))] += 1
    assert torch.equal(mrr.diff_traces(a, b).overlap_counts, expected)


def test_rows_and_layers_of_one_trace_only_are_counted_not_compared():
    a = big_trace(10, replay_mask=torch.arange(10) != 3)
    b = big_trace(10, replay_mask=torch.arange(10) != 7).select_layers([3, 4, 5]).gather_rows(slice(9))
    diff = mrr.diff_traces(a, b)
    assert (diff.rows_compared, diff.rows_only_a, diff.rows_only_b) == (7, 2, 1)
    assert diff.layers_only_a == (2, 6)
    assert diff.layer_numbers == (3, 4, 5)
    assert diff.decisions_different == 0
    assert not diff.same
    assert diff.same_in_common
    assert str(diff).startswith("The traces differ in what they cover; what both cover is the same.\n")
    dense = trace_of(torch.zeros(600, 0, 2, dtype=torch.uint8), num_experts=16)
    assert [str(fact) for fact in mrr.diff_traces(big_trace(), dense).facts] == [
        "no layer is in both: a has 2..6, b has none.",
    ]


def samples_of(order, *, routes=None, lost=0):
    """Samples of 5, 3, 4, 3 and 6 tokens; samples 1 and 3 are equal, and `lost` tokens are cut from the end."""
    lengths, begin = (5, 3, 4, 3, 6), (0, 5, 8, 12, 15)
    whole = big_trace(21) if routes is None else big_trace(21)._with(topk_indices=routes)
    tokens = torch.arange(21) + 50
    tokens[12:15] = tokens[5:8]
    rows = torch.cat([torch.arange(begin[i], begin[i] + lengths[i]) for i in order])
    rows = rows[: len(rows) - lost]
    lengths = [lengths[i] for i in order]
    lengths[-1] -= lost
    return whole.gather_rows(rows)._with(sequence_lengths=tuple(lengths), token_ids=tokens[rows].to(torch.int32))


@pytest.mark.parametrize("kind", ["memory", "file", "parts"])
def test_samples_are_matched_by_their_tokens_and_equal_ones_keep_their_order(kind, tmp_path):
    a, b = samples_of(range(5)), samples_of((4, 1, 2, 3, 0))
    given_b = b
    if kind == "file":
        mrr.save_trace(b, tmp_path / "b.safetensors")
        given_b = tmp_path / "b.safetensors"
    if kind == "parts":
        given_b = [b.select_layers([2, 3]), b.select_layers([4, 5, 6])]
    diff = mrr.diff_traces(a, given_b)
    assert diff.same
    assert [str(fact) for fact in diff.facts] == [
        "samples are matched by their tokens, and rows of b are numbered as in a; samples 0, 4 of a are samples 4, 0 of b."
    ]
    # Without token ids, rows are compared by their numbers.
    assert not mrr.diff_traces(a, b._with(token_ids=None)).same
    # Of two samples with equal tokens the first one is compared with the first one.
    assert mrr.diff_traces(a, samples_of((4, 3, 2, 1, 0))).rows_all_same == 21 - 2 * 3


def test_a_part_with_fewer_rows_has_no_weight_version_of_the_others():
    versions = torch.tensor([5] * 5 + [6] * 16)
    a = samples_of(range(5))._with(weight_version=versions.to(torch.int32))
    # The samples of b come in another order, so its rows are gathered; the second part has 17 of 21 rows.
    b = mrr.concat_traces([list(a.samples())[i] for i in (0, 4, 1, 2, 3)])
    diff = mrr.diff_traces(a, [b.select_layers([2, 3]), b.select_layers([4, 5, 6]).gather_rows(slice(17))])
    assert (diff.rows_compared, diff.rows_only_a, diff.decisions_different) == (17, 4, 0)
    assert (diff.origin_a, diff.origin_b) == ("in memory, weights 5..6", "2 parts, weights 5..6")


def test_samples_of_parts_that_know_some_tokens_each_are_matched_by_all_of_them():
    """As ranks of context parallelism record them."""
    a = samples_of(range(5))
    b = samples_of((4, 1, 2, 3, 0))
    even = torch.arange(21) % 2 == 0
    parts = [
        b._with(replay_mask=b.replay_mask & mask, token_ids=torch.where(mask, b.token_ids, -1))
        for mask in (even, ~even)
    ]
    diff = mrr.diff_traces(a, parts)
    assert (diff.rows_compared, diff.decisions_different, diff.rows_other_token) == (int(a.replay_mask.sum()), 0, 0)
    assert "samples are matched by their tokens" in one_line(diff)


def test_samples_without_an_equal_one_are_compared_by_their_number_or_counted():
    a = samples_of(range(5))
    routes = big_trace(21).topk_indices.clone()
    routes[20, 1] = (routes[20, 1] + 1) % 16
    shorter = samples_of(
        (2, 0, 1, 3, 4), routes=routes, lost=1
    )  # the last sample misses a token, so its routes' last row
    diff = mrr.diff_traces(a, shorter)
    assert (diff.rows_compared, diff.rows_only_a, diff.rows_only_b, diff.decisions_different) == (20, 1, 0, 0)
    diff = mrr.diff_traces(shorter, a)
    assert (diff.rows_compared, diff.rows_only_a, diff.rows_only_b, diff.decisions_different) == (20, 0, 1, 0)
    fewer = mrr.diff_traces(a, samples_of((4, 2)))
    assert (fewer.rows_compared, fewer.rows_only_a, fewer.decisions_different) == (10, 11, 0)
    assert [str(fact) for fact in fewer.facts] == [
        "samples are matched by their tokens, and rows of b are numbered as in a; samples 2, 4 of a are samples 1, 0 of b; "
        "samples 0..1, 3 of a have no equal in b.",
        "11 rows of samples 0..1, 3 have a route in a and none in b.",
    ]
    one = mrr.diff_traces(a, samples_of((4,)))
    assert (one.rows_compared, one.rows_only_a, one.decisions_different) == (6, 15, 0)
    tokens = a.token_ids.clone()
    tokens[20] = 9
    diff = mrr.diff_traces(a, a._with(token_ids=tokens))
    assert "1 of 21 rows hold a different token, first row 20." in one_line(diff)
    assert not diff.same


def test_the_first_different_token_is_where_it_is_however_rows_are_read(monkeypatch):
    monkeypatch.setattr(source, "BLOCK_BYTES", 1)
    a = big_trace(21)._with(sequence_lengths=(12, 9), token_ids=torch.arange(21, dtype=torch.int32))
    tokens = a.token_ids.clone()
    tokens[15:] = 9
    for block_rows in (1 << 14, 7):
        monkeypatch.setattr(source, "_BLOCK_ROWS", block_rows)
        diff = mrr.diff_traces(a, a._with(token_ids=tokens))
        assert "6 of 21 rows hold a different token, first row 15." in one_line(diff)
        assert diff.rows_alike == 15


def test_rows_after_the_end_of_the_other_trace_are_counted_in_their_samples(monkeypatch):
    monkeypatch.setattr(source, "BLOCK_BYTES", 1)
    a = big_trace(21)._with(sequence_lengths=(5, 3, 4, 9))
    for block_rows in (1 << 14, 7):  # rows of a block that both have in part, and blocks that a alone has
        monkeypatch.setattr(source, "_BLOCK_ROWS", block_rows)
        facts = [str(fact) for fact in mrr.diff_traces(a, big_trace(21).gather_rows(slice(6))).facts]
        assert facts == ["15 rows of samples 1..3 have a route in a and none in b."]
        facts = [str(fact) for fact in mrr.diff_traces(a.gather_rows(slice(6)), a).facts]
        assert facts == ["15 rows of samples 1..3 have a route in b and none in a."]
        assert not mrr.diff_traces(a.gather_rows(slice(6)).with_samples((6,)), big_trace(21)).facts  # of no sample


def test_parts_of_two_layouts_compare_by_global_rows():
    whole = big_trace()
    even, early = torch.arange(600) % 2 == 0, torch.arange(600) < 350
    stages = [whole.select_layers([2, 3]), whole.select_layers([4, 5, 6])]
    one = [stage._with(replay_mask=mask) for stage in stages for mask in (even, ~even)]
    other = [whole._with(replay_mask=mask) for mask in (early, ~early)]
    assert mrr.diff_traces(one, other).same
    changed = other[1].topk_indices.clone()
    changed[400, 2] = torch.tensor([14, 15], dtype=torch.uint8)
    diff = mrr.diff_traces(one, [other[0], other[1]._with(topk_indices=changed, sequence_lengths=(350, 250))])
    assert str(diff.first_by_layer).startswith("layer 4, row 400 (sample 1, position 50)\n")
    incomplete = mrr.diff_traces([stages[0], stages[1]._with(replay_mask=even)], whole)
    assert (incomplete.rows_compared, incomplete.rows_only_b) == (300, 300)
    with pytest.raises(TraceError, match="part 0 and part 1 disagree on row 0"):
        mrr.diff_traces([whole, big_trace(seed=1)], whole)


def test_parts_of_different_batches_are_not_one_trace():
    stages = [big_trace(21).select_layers(numbers) for numbers in ([2, 3], [4, 5, 6])]
    parts = [stages[0].with_samples((10, 11)), stages[1].with_samples((11, 10))]
    with pytest.raises(TraceError, match="MRR107: cannot merge parts with different sequence_lengths"):
        mrr.diff_traces(parts, big_trace(21))


def test_files_of_several_blocks_give_the_same_counts_and_first_rows(tmp_path, monkeypatch):
    a = make_trace(40_000, layer_numbers=(1, 2), topk=1, token_ids=torch.arange(40_000))
    routes = a.topk_indices.clone()
    routes[100:, 0] = (routes[100:, 0] + 1) % 8
    b = a._with(topk_indices=routes)
    whole = mrr.diff_traces(a, b)
    assert whole.position_width == 313  # 40,000 positions in at most 128 bins
    assert [each.row for each in whole.differences][:3] == [100, 313, 626]
    mrr.save_trace(a, tmp_path / "a.safetensors")
    mrr.save_trace(b, tmp_path / "b.safetensors")
    monkeypatch.setattr(source, "BLOCK_BYTES", 1)
    seen = []
    found = mrr.diff_traces(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", on_rows=lambda done, total: seen.append((done, total))
    )
    nowhere = {"origin_a": "", "origin_b": ""}
    assert found.to_dict() | nowhere == whole.to_dict() | nowhere
    assert found.differences == whole.differences
    assert seen == [(16384, 40000), (32768, 40000), (40000, 40000)]


def test_folders_of_a_store_and_of_loose_files(tmp_path):
    trace = big_trace(weight_version=torch.arange(600) // 300 + 6)
    store = TraceStore(tmp_path / "store", run="a")
    store.save(trace.select_layers([2, 3]), step=7, rank=0)
    store.save(trace.select_layers([4, 5, 6]), step=7, rank=1)
    (tmp_path / "loose").mkdir()
    mrr.save_trace(trace, tmp_path / "loose" / "x.safetensors")
    diff = mrr.diff_traces(tmp_path / "store", trace, name_a="trainer", name_b="\x1b[31m")
    assert diff.same
    assert str(diff).splitlines()[1:3] == [
        f"trainer: {tmp_path / 'store'}, step 7, 2 files, weights 6..7",
        "\\x1b[31m: in memory, weights 6..7",
    ]
    assert mrr.diff_traces(tmp_path / "store", tmp_path / "loose").same
    store.save(trace, step=8)
    with pytest.raises(StoreError, match=r"cannot find one step of .*: it has steps \[7, 8\]"):
        mrr.diff_traces(tmp_path / "store", trace)
    TraceStore(tmp_path / "store", run="b").save(trace, step=8, rank=1)
    with pytest.raises(StoreError, match=r"runs \[a, b\] saved it. Name one, run="):
        mrr.diff_traces(tmp_path / "store", trace, step_a=8)
    assert mrr.diff_traces(tmp_path / "store", trace, step_a=8, run_a="b").same
    # The folder of a step alone is no mixture of its runs either.
    assert mrr.diff_traces(store.folder(7), trace).same
    with pytest.raises(StoreError, match=r"runs \[a, b\] saved it. Name one, run="):
        mrr.diff_traces(store.folder(8), trace)
    assert mrr.diff_traces(store.folder(8), trace, run_a="b").same
    with pytest.raises(StoreError, match=r"cannot find step 7 in .*: it is the folder of step 8"):
        mrr.diff_traces(store.folder(8), trace, step_a=7, run_a="b")


def exchange_one_expert(a, by_layer):
    """Exchange one expert in a share of each layer's decisions, spread over the rows."""
    routes = a.topk_indices.to(torch.int64)
    for layer, share in enumerate(by_layer):
        rows = (37 * torch.arange(a.num_tokens) % 100 < round(100 * share)).nonzero().squeeze(1)
        first, second = routes[rows, layer].unbind(1)
        other = (first + 1) % 16
        routes[rows, layer, 1] = torch.where(other == second, (other + 1) % 16, other)
    return a._with(topk_indices=routes.to(torch.uint8))


CAPTURED = "routes that were recorded or captured wrongly"
OPEN = "the routes alone do not say which; compare the weights first"
ROUNDING = (
    "That fits rounding (another precision, kernel or layout), and as well weights or a config that differ a little: "
)


@pytest.mark.parametrize(
    ("by_layer", "words", "not_words"),
    [
        ((0.02, 0.03, 0.04, 0.08, 0.1), f"no place stands out: 5.40 % of decisions differ, all of them by one expert; 20 of "
         f"1,000 rows in layer 2, 100 in layer 6. {ROUNDING}{OPEN}", "something between"),
        ((0.05, 0.05, 0.05, 0.04, 0.04), "no place stands out: 4.60 % of decisions differ", "something between"),
        ((0.1, 0.1, 0.1, 0.1, 0.1), "something between the embedding and layer 2, or everywhere, differs: 100 of 1,000 rows "
         "differ in layer 2, 100.00 % of them by one expert; 10.00 % of decisions differ, all of them by one expert. That "
         "fits rounding (another precision, kernel or layout), weights or a config that differ a little, positions, the "
         f"attention's mask or its packing, a random mask, or {CAPTURED}: {OPEN}", "no place"),
        ((0.15, 0.15, 0.15, 0.15, 0.15), "That fits weights, a config, positions, the attention's mask or its packing, a "
         f"random mask, rounding (another precision, kernel or layout), or {CAPTURED}: {OPEN}", "fits rounding"),
        ((0.5, 0.5, 0.5, 0.5, 0.5), "That fits weights, a config, positions, the attention's mask or its packing, a random "
         f"mask, or {CAPTURED}: {OPEN}", "rounding"),
        ((0.04, 0.08, 0.12, 0.15, 0.15), "That fits weights or a config that differ a little, and as well rounding (another "
         f"precision, kernel or layout): {OPEN}", "something between"),
        ((0.0, 0.02, 0.04, 0.08, 0.1), "something between layer 2 and layer 3, or after every layer, differs: 20 of 1,000 "
         "rows differ in layer 3, 100.00 % of them by one expert, and none in the layers below; 4.80 % of decisions differ, "
         "all of them by one expert. That fits another precision or kernel; weights or a config of the experts of "
         "layer 2 or of their scores", "no place"),
        ((0.01, 0.01, 0.01, 0.01, 0.1), "something between layer 5 and layer 6 differs: 100 of 1,000 rows differ in layer 6, "
         "100.00 % of them by one expert, and 1.00 % at most in the layers below", "no place"),
        ((0.0, 0.0, 0.0, 0.05, 0.0), "layer 5 alone differs, and later layers do not follow: 50 of 1,000 ", "between layer"),
        ((0.0, 0.0, 0.0, 0.01, 0.0), "10 decisions differ, all of them by one expert: too few to show where they begin. "
         f"{ROUNDING}{OPEN}", "alone differs"),
        ((0.0, 0.42, 0.40), "something between layer 2 and layer 3, or after every layer, differs: ", "rounding"),
        ((0.0, 0.35, 0.09), "something between layer 2 and layer 3, or after every layer, differs: ", "rounding"),
    ],
)  # fmt: skip
def test_where_differences_begin_and_the_causes_that_this_leaves(by_layer, words, not_words):
    a = make_trace(1000, layer_numbers=(2, 3, 4, 5, 6)[: len(by_layer)], topk=2, num_experts=16)
    diff = mrr.diff_traces(a, exchange_one_expert(a, by_layer))
    assert [fact for fact in diff.facts if fact.kind != "expert"] == []
    assert words in diff.conclusion
    assert not_words not in diff.conclusion
    assert one_line(diff).startswith(f"The traces differ: {diff.conclusion.removeprefix('the traces differ: ')}")


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0.04, "That fits weights or a config that differ, a random mask, different rows in some places, or "),
        (0.12, "the attention's mask or its packing, a random mask, different rows in some places, or "),
    ],
)
def test_whole_sets_that_flip_are_not_called_rounding(share, words):
    a = big_trace()
    flip = torch.rand(600, 5, 1, generator=torch.Generator().manual_seed(3)) < share
    diff = mrr.diff_traces(a, a._with(topk_indices=torch.where(flip, big_trace(seed=4).topk_indices, a.topk_indices)))
    assert ("no place stands out: " if share < 0.05 else "something between the embedding and ") in diff.conclusion
    assert "rounding" not in diff.conclusion
    assert f"{words}{CAPTURED}: {OPEN}" in diff.conclusion


def test_weights_of_different_versions_come_first():
    a = make_trace(1000, layer_numbers=(2, 3, 4, 5, 6), topk=2, num_experts=16)
    b = exchange_one_expert(a, (0.02, 0.03, 0.04, 0.08, 0.1))
    six, seven = (
        trace._with(weight_version=torch.full((1000,), v, dtype=torch.int32)) for trace, v in ((a, 6), (b, 7))
    )
    said = "the weights have different versions, 6 in a and 7 in b, which is enough to change routes"
    assert said in mrr.diff_traces(six, seven).conclusion
    assert "different versions" not in mrr.diff_traces(six, six._with(topk_indices=b.topk_indices)).conclusion


def test_the_text_lists_the_layers_that_differ_most_and_counts_the_others():
    a = make_trace(200, layer_numbers=tuple(range(1, 13)), topk=2, num_experts=16, sequence_lengths=(120, 80))
    diff = mrr.diff_traces(a, a._with(topk_indices=a.topk_indices.roll(1, 0)))
    text = str(diff)
    words = (
        "fact: rows 1..199 (samples 0..1) of b match a's rows 0..198 (1 row earlier), in all layers: 2,388 of 2,388 "
    )
    assert words in one_line(diff)
    assert text.endswith("  2 more layers differ less")


def test_other_models_are_refused_and_empty_traces_are_the_same():
    with pytest.raises(TraceError, match="num_experts=16 and b with num_experts=8"):
        mrr.diff_traces(big_trace(), make_trace(600))
    empty = trace_of(torch.zeros(0, 2, 2, dtype=torch.uint8))
    diff = mrr.diff_traces(empty, empty)
    assert diff.same
    assert str(diff).startswith("The traces are the same.\n")
    assert diff.to_dict()["same_by_layer"] == [None, None]


def test_rows_as_unlike_as_unrelated_ones_have_different_tokens_only_where_these_may_differ():
    a = big_trace(sequence_lengths=(300, 300))
    routes = a.topk_indices.clone()
    routes[100:200] = big_trace(seed=4).topk_indices[100:200]
    words = "100 rows are as unlike as unrelated ones: "
    diff = mrr.diff_traces(a, a._with(topk_indices=routes))
    assert (
        f"{words}other tokens in these rows (another answer, request or step), or routes of other rows."
        in diff.conclusion
    )
    tokens = torch.arange(600, dtype=torch.int32)
    diff = mrr.diff_traces(a._with(token_ids=tokens), a._with(topk_indices=routes, token_ids=tokens))
    assert f"{words}their tokens are the same, so these are routes of other rows" in diff.conclusion
    # Rows of the same tokens agree in the lowest layer.
    routes[100:200, 0] = a.topk_indices[100:200, 0]
    diff = mrr.diff_traces(a, a._with(topk_indices=routes))
    assert diff.facts[0].layer_numbers == (3, 4, 5, 6)
    assert words not in diff.conclusion
    assert "something between layer 2 and layer 3, or after every layer, differs: " in diff.conclusion
