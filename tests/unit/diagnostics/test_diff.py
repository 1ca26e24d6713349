"""diff_traces: what differs, where first, and what it looks like."""

import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron_router_replay as mrr
from megatron_router_replay.diagnostics import evidence, source
from megatron_router_replay.diagnostics.fact import Fact, fact_lines
from megatron_router_replay.diagnostics.trace_diff import samples_table
from megatron_router_replay.errors import StoreError, TraceError
from megatron_router_replay.store import TraceStore
from tests.unit.store.store_traces import make_trace


def trace_of(indices, layer_numbers=None, num_experts=8, **values):
    indices = torch.as_tensor(indices)
    numbers = layer_numbers or range(1, indices.shape[1] + 1)
    return mrr.RoutingTrace(topk_indices=indices, layer_numbers=numbers, num_experts=num_experts, **values)


def big_trace(num_tokens=600, **options):
    return make_trace(num_tokens, layer_numbers=(2, 3, 4, 5, 6), topk=2, num_experts=16, **options)


def with_routes(trace, indices, **changes):
    return trace._with(topk_indices=indices, **changes)


A = trace_of([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 2], [1, 3]]], layer_numbers=(2, 5), sequence_lengths=(1, 2))
B = trace_of([[[0, 1], [2, 3]], [[5, 4], [6, 1]], [[3, 1], [1, 3]]], layer_numbers=(2, 5))


def test_counts_by_layer_position_and_sample_are_those_counted_by_hand():
    diff = mrr.diff_traces(A, B)
    assert diff.rows_compared == 3
    assert diff.overlap_counts.tolist() == [
        [1, 0, 2],
        [0, 1, 2],
    ]  # layer 2: row 2 shares none; layer 5: row 1 shares expert 6
    assert diff.other_order.tolist() == [1, 0]  # [4, 5] and [5, 4]
    assert diff.decisions_different == 2
    assert diff.agreement_by_layer.tolist() == pytest.approx([2 / 3, 2 / 3])
    assert diff.overlap_by_layer.tolist() == pytest.approx([2 / 3, 2.5 / 3])
    assert diff.rows_all_same == 1
    assert diff.compared_by_position.tolist() == [2, 1]
    assert diff.different_by_position.tolist() == [[0, 1], [1, 0]]
    assert diff.compared_by_sample.tolist() == [2, 4]
    assert diff.different_by_sample.tolist() == [0, 2]
    assert samples_table(diff).rows == [("0", "2", "0", "100.00 %"), ("1", "4", "2", "50.00 %")]
    assert diff
    assert not diff.same
    assert not mrr.diff_traces(A, A)


def test_the_first_rows_that_differ_are_kept_with_their_experts_and_tokens():
    a, b = (
        trace._with(token_ids=torch.tensor([5, -1, 7], dtype=torch.int32) + add) for trace, add in ((A, 0), (B, 10))
    )
    by_layer = [
        (found.layer_number, found.row, found.sample, found.position, found.experts_a, found.experts_b, found.token_a)
        for found in mrr.diff_traces(a, b).differences
    ]
    assert by_layer == [(2, 2, 1, 1, (0, 2), (3, 1), 7), (5, 1, 1, 0, (6, 7), (6, 1), None)]
    diff = mrr.diff_traces(a, b)
    assert (diff.first_by_layer, diff.first_by_row) == diff.differences
    assert [found.token_b for found in diff.differences] == [17, 9]
    assert [found.token_b for found in mrr.diff_traces(a, B).differences] == [None, None]


def test_at_most_three_rows_are_kept_of_a_cell_and_they_are_the_first(monkeypatch):
    a = make_trace(9000, layer_numbers=(1, 2), topk=1)
    other = (a.topk_indices + 1) % 8
    other[:100, 0], other[:, 1] = a.topk_indices[:100, 0], a.topk_indices[:, 1]
    other[8999, 1] = (a.topk_indices[8999, 1] + 1) % 8
    monkeypatch.setattr(source, "BLOCK_BYTES", 1)
    diff = mrr.diff_traces(a, a._with(topk_indices=other))
    assert diff.position_width == 71  # 9,000 positions in at most 128 bins
    rows = [found.row for found in diff.differences if found.layer_number == 1]
    assert rows[:9] == [100, 101, 102, 142, 143, 144, 213, 214, 215]
    assert rows[-3:] == [8946, 8947, 8948]
    assert [found.row for found in diff.differences if found.layer_number == 2] == [8999]
    assert (diff.first_by_layer.row, diff.first_by_row.row) == (100, 100)


def test_it_knows_files_step_date_and_weight_versions(tmp_path):
    trace = big_trace(weight_version=torch.arange(600) // 300 + 6)
    store = TraceStore(tmp_path / "store", run="a")
    store.save(trace.select_layers([2, 3]), step=7, rank=0)
    store.save(trace.select_layers([4, 5, 6]), step=7, rank=1)
    for file in (tmp_path / "store").rglob("*.safetensors"):
        os.utime(file, (0, 86_400 * 365 + 3_660))  # a year and 61 minutes into 1970
    diff = mrr.diff_traces(tmp_path / "store", trace, name_a="trainer")
    assert diff.provenance_a.path == str(tmp_path / "store")
    assert len(diff.provenance_a.files) == 2
    assert str(diff).splitlines()[:2] == [
        f"trainer: {tmp_path / 'store'}, step 7, 2 files, written 1971-01-01 01:01 UTC, weights 6, 7",
        "b: in memory, weights 6, 7",
    ]
    values = diff.to_dict()
    assert values["provenance_a"]["step"] == 7
    assert values["provenance_a"]["written"] == "1971-01-01 01:01"
    assert values["provenance_b"] == {"path": "", "files": [], "step": None, "written": "", "weight_versions": [6, 7]}


def test_rows_whose_weight_version_is_unknown_name_none():
    a = big_trace(weight_version=torch.full((600,), -1))
    assert mrr.diff_traces(a, a).provenance_a.weight_versions == ()


def test_repr_is_the_text_and_names_from_outside_are_escaped():
    diff = mrr.diff_traces(A, B, name_b="\x1b[31m")
    assert repr(diff) == str(diff)
    assert "\n\\x1b[31m: in memory\n" in str(diff)
    assert "\n    \\x1b[31m: experts [3, 1]\n" in str(diff)


def test_facts_stand_before_the_layers_that_differ_and_the_verdict():
    lines = str(
        mrr.diff_traces(big_trace(), with_routes(big_trace(), big_trace().topk_indices.roll(1, 0)))
    ).splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("fact: rows 1..599 of b hold a's rows 0..598"))
    assert lines[place + 1].split() == ["layer", "differ", "agreement", "overlap", "different", "order"]
    assert [line.split()[0] for line in lines[place + 2 : -1]] == ["2", "3", "4", "5", "6"]
    assert lines[-1] == "the traces differ"


def test_layers_that_are_not_listed_are_counted_without_an_option_of_the_command():
    a = make_trace(200, layer_numbers=tuple(range(1, 13)), topk=2, num_experts=16)
    diff = mrr.diff_traces(a, a._with(topk_indices=a.topk_indices.roll(1, 0)))
    assert "  2 more layers differ less\n" in str(diff)


def test_more_facts_than_a_screen_holds_are_counted():
    fact = Fact(kind="tokens", text="one")
    assert fact_lines([fact] * 14)[-2:] == ["fact: one", "fact: 2 more facts about fewer rows are left out here."]
    assert len(fact_lines([fact] * 12)) == 12


def test_the_same_experts_in_another_order_are_the_same():
    trace = big_trace()
    diff = mrr.diff_traces(trace, with_routes(trace, trace.topk_indices.flip(2)))
    assert diff.same
    assert diff.decisions_other_order == diff.decisions == 600 * 5
    assert diff.first_by_layer is None
    assert [fact.kind for fact in diff.facts] == ["expert_order"]


def test_rows_and_layers_of_one_trace_only_are_counted_not_compared():
    a = big_trace(10, replay_mask=torch.arange(10) != 3)
    b = big_trace(10, replay_mask=torch.arange(10) != 7).select_layers([3, 4, 5])[:9]
    diff = mrr.diff_traces(a, b)
    assert (diff.rows_compared, diff.rows_only_a, diff.rows_only_b) == (7, 2, 1)
    assert diff.layers_only_a == (2, 6)
    assert diff.layer_numbers == (3, 4, 5)
    assert diff.decisions_different == 0
    assert not diff.same
    assert diff.same_in_common
    assert str(diff).endswith("the traces differ in what they cover; what both cover is the same")


def test_parts_of_two_layouts_compare_by_global_rows():
    whole = big_trace()
    even, early = torch.arange(600) % 2 == 0, torch.arange(600) < 350
    stages = [whole.select_layers([2, 3]), whole.select_layers([4, 5, 6])]
    one = [with_routes(stage, stage.topk_indices, replay_mask=mask) for stage in stages for mask in (even, ~even)]
    other = [with_routes(whole, whole.topk_indices, replay_mask=mask) for mask in (early, ~early)]
    assert mrr.diff_traces(one, other).same
    changed = other[1].topk_indices.clone()
    changed[400, 2] = torch.tensor([14, 15], dtype=torch.uint8)
    diff = mrr.diff_traces(one, [other[0], with_routes(other[1], changed)])
    assert str(diff.first_by_layer).startswith("layer 4, row 400\n")


def test_ranks_that_contradict_each_other_are_an_error():
    with pytest.raises(TraceError, match="part 0 and part 1 disagree on row 0"):
        mrr.diff_traces([big_trace(), big_trace(seed=1)], big_trace())


def test_files_of_several_blocks_give_the_same_counts(tmp_path, monkeypatch):
    a = make_trace(20_000, sequence_lengths=[100] * 200, token_ids=torch.arange(20_000))
    b = make_trace(20_000, token_ids=torch.arange(20_000), seed=5)
    whole = mrr.diff_traces(a, b)
    mrr.save_trace(a, tmp_path / "a.safetensors")
    mrr.save_trace(b, tmp_path / "b.safetensors")
    monkeypatch.setattr(source, "BLOCK_BYTES", 1)
    seen = []
    found = mrr.diff_traces(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", on_rows=lambda done, total: seen.append((done, total))
    )
    nowhere = {"provenance_a": None, "provenance_b": None}
    assert found.to_dict() | nowhere == whole.to_dict() | nowhere
    assert found.differences == whole.differences
    assert seen == [(16384, 20000), (20000, 20000)]


def test_folders_of_a_store_and_of_loose_files(tmp_path):
    trace = big_trace()
    store = TraceStore(tmp_path / "store", run="a")
    store.save(trace.select_layers([2, 3]), step=7, rank=0)
    store.save(trace.select_layers([4, 5, 6]), step=7, rank=1)
    (tmp_path / "loose").mkdir()
    mrr.save_trace(trace, tmp_path / "loose" / "x.safetensors")
    assert mrr.diff_traces(tmp_path / "store", tmp_path / "loose").same
    store.save(trace, step=8)
    with pytest.raises(StoreError, match=r"holds 2 steps \(7, 8\): say which"):
        mrr.diff_traces(tmp_path / "store", trace)
    assert mrr.diff_traces(tmp_path / "store", trace, step_a=8).same


def test_other_tokens_in_the_same_rows_are_found():
    a = big_trace(token_ids=torch.arange(600))
    b = big_trace(token_ids=torch.arange(600) + (torch.arange(600) > 590))
    diff = mrr.diff_traces(a, b)
    assert diff.rows_other_token == 9
    assert not diff.same
    assert [str(fact) for fact in diff.facts] == ["9 of 600 rows hold a different token, first row 591."]


def rows_at(routes, start, stop, source):
    """Rows that hold those from `source` on."""
    routes = routes.clone()
    routes[start:stop] = routes[source : source + stop - start].clone()
    return routes


PLANTED = {
    "rows shifted down": (
        600,
        lambda routes: routes.roll(1, 0),
        "rows 1..599 of b hold a's rows 0..598 (1 row earlier), in all layers: 2,995 of 2,995 decisions.",
    ),
    "rows shifted from a row on": (
        1000,
        lambda routes: rows_at(routes, 500, 1000, 499),
        "a's row 499 comes twice in b: rows 500..999 hold a's rows 499..998 (1 row earlier)...",
    ),
    "two layers swapped": (
        600,
        lambda routes: routes[:, [0, 3, 2, 1, 4]],
        "layers 3, 5 of b hold layers 5, 3 of a, in all 600 rows: 1,200 of 1,200 decisions.",
    ),
    "a layer lost": (
        600,
        lambda routes: routes.index_copy(1, torch.tensor([3]), torch.arange(2, dtype=torch.uint8).expand(600, 1, 2)),
        "all 600 rows of b repeat experts [0, 1] in layer 5: 600 of 600 decisions.",
    ),
    # Of these traces only pieces are read again.
    "two layers of a long trace swapped": (
        20_000,
        lambda routes: routes[:, [0, 3, 2, 1, 4]],
        "layers 3, 5 of b hold layers 5, 3 of a, ... decisions that were looked at.",
    ),
    "a few rows of a long trace shifted": (
        20_000,
        lambda routes: rows_at(routes, 9000, 9300, 8999),
        "rows 9000..9299 of b hold a's rows 8999..9298 (1 row earlier), in all layers: 1,500 of 1,500 decisions.",
    ),
    "samples far apart that changed places": (
        20_000,
        lambda routes: routes.view(100, 200, 5, 2)[[*range(3), 80, *range(4, 80), 3, *range(81, 100)]].view(-1, 5, 2),
        "samples 3 and 80 of b changed places, in all layers: ...",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_planted_is_said_in_one_line(name, monkeypatch):
    num_tokens, change, line = PLANTED[name]
    monkeypatch.setattr(evidence, "MAX_ROWS", 1024)
    a = big_trace(num_tokens, sequence_lengths=[200] * 100 if "samples" in name else None)
    (fact,) = mrr.diff_traces(a, with_routes(a, change(a.topk_indices))).facts
    beginning, _, end = line.partition("...")
    assert str(fact).startswith(beginning)
    assert str(fact).endswith(end)


def test_two_places_with_rows_between_that_agree_are_two_facts(monkeypatch):
    monkeypatch.setattr(evidence, "MAX_ROWS", 1024)
    a = big_trace(20_000)
    some = a.topk_indices
    for start in (3000, 15000):
        some = rows_at(some, start, start + 200, start + 1)
    facts = mrr.diff_traces(a, with_routes(a, some)).facts
    assert sorted(fact.rows for fact in facts) == [(3000, 3199), (15000, 15199)]


@pytest.mark.parametrize(
    ("different", "words"),
    [
        (
            (0.0, 0.02, 0.04, 0.08, 0.1),
            "looks like rounding: 4.80 % of decisions, from layer 3 on, more with depth; all exchange one expert.",
        ),
        ((0.1, 0.1, 0.1, 0.1, 0.1), "looks like rounding: 10.00 % of decisions from layer 2 on; all"),
        ((0.2, 0.1, 0.1, 0.02, 0.02), "looks like rounding: 8.80 % of decisions from layer 2 on, less with depth; all"),
        (
            (0.01, 0.01, 0.01, 0.01, 0.1),
            "looks like rounding: 2.80 % of decisions from layer 2 on, most in layer 6; all",
        ),
        ((0.0, 0.0, 0.0, 0.05, 0.0), "looks like rounding: 1.00 % of decisions, only in layer 5; all"),
    ],
)
def test_without_a_fact_it_says_how_much_differs_and_how_that_grows(different, words):
    a = make_trace(1000, layer_numbers=(2, 3, 4, 5, 6), topk=2, num_experts=16)
    routes = a.topk_indices.to(torch.int64)
    for layer, share in enumerate(different):
        rows = (37 * torch.arange(1000) % 100 < round(100 * share)).nonzero().squeeze(1)
        first, second = routes[rows, layer].unbind(1)
        other = (first + 1) % 16
        routes[rows, layer, 1] = torch.where(other == second, (other + 1) % 16, other)
    diff = mrr.diff_traces(a, with_routes(a, routes.to(torch.uint8)))
    assert diff.facts == ()
    assert words in str(diff)


def test_whole_sets_that_flip_are_not_called_rounding():
    a = big_trace()
    flip = torch.rand(600, 5, generator=torch.Generator().manual_seed(3)) < 0.05
    diff = mrr.diff_traces(
        a, with_routes(a, torch.where(flip.unsqueeze(2), big_trace(seed=4).topk_indices, a.topk_indices))
    )
    assert diff.facts == ()
    assert "no rows or layers stand out: 5.00 % of decisions from layer 2 on; " in str(diff)


def test_other_models_are_refused():
    with pytest.raises(TraceError, match="num_experts=16 and b with num_experts=8"):
        mrr.diff_traces(big_trace(), make_trace(600))


def test_empty_traces_are_the_same_and_print():
    empty = trace_of(torch.zeros(0, 2, 2, dtype=torch.uint8))
    diff = mrr.diff_traces(empty, empty)
    assert diff.same
    assert "the traces are the same" in str(diff)
    assert diff.to_dict()["agreement_by_layer"] == [None, None]


def test_a_trace_of_a_stage_without_layers_is_compared_too():
    a, dense = big_trace(), trace_of(torch.zeros(600, 0, 2, dtype=torch.uint8), num_experts=16)
    assert [str(fact) for fact in mrr.diff_traces(a, dense).facts] == [
        "no layer is in both: a has 2..6, b has none.",
    ]
    assert [fact.kind for fact in mrr.diff_traces(dense, a).facts] == ["layers"]


def test_the_text_fits_80_columns_without_facts_and_the_dict_is_json():
    diff = mrr.diff_traces(A, B)
    sentence = next(line for line in str(diff).splitlines() if line.startswith("no rows or layers stand out"))
    assert max(len(line) for line in str(diff).splitlines() if line != sentence) <= 80
    assert json.loads(json.dumps(diff.to_dict()))["decisions_different"] == 2


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 9),
    st.integers(1, 3),
    st.sampled_from([(1, 4), (2, 8), (3, 8), (6, 64), (8, 300)]),
    st.integers(0, 2**31),
)
def test_overlap_is_that_of_python_sets(num_tokens, num_layers, sizes, seed):
    topk, num_experts = sizes
    numbers = tuple(range(1, num_layers + 1))
    a, b = (
        make_trace(num_tokens, layer_numbers=numbers, topk=topk, num_experts=num_experts, seed=seed + i) for i in (0, 1)
    )
    indices = b.topk_indices.clone()
    indices[::2] = a.topk_indices[::2]
    b = mrr.RoutingTrace(topk_indices=indices, layer_numbers=numbers, num_experts=num_experts)
    diff = mrr.diff_traces(a, b)
    expected = torch.zeros(num_layers, topk + 1, dtype=torch.int64)
    for row_a, row_b in zip(a.topk_indices.tolist(), b.topk_indices.tolist()):
        for layer, (one, other) in enumerate(zip(row_a, row_b)):
            expected[layer, len(set(one) & set(other))] += 1
    assert torch.equal(diff.overlap_counts, expected)


def test_samples_of_other_lengths_are_named_up_to_three():
    a, b = (trace_of([[[0, 1]]] * 10, sequence_lengths=lengths) for lengths in ((1, 2, 3, 4), (2, 1, 4, 3)))
    said = (
        "4 of 4 samples have different lengths in a and in b: sample 0 1 and 2, sample 1 2 and 1, sample 2 3 and 4, ..."
    )
    assert f"{said} rows" in str(mrr.diff_traces(a, b)).replace("\n", " ")
