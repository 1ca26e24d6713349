"""Megatron-Core's own routing trace, lines as `core.transformer.moe.router_trace` of 0.19.2 writes them."""

import json
from types import SimpleNamespace

import pytest
import torch

from megatron_router_replay import engines
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import routes

MODEL = engines.ModelRoutingInfo(num_layers=4, moe_layer_numbers=(2, 3, 4), num_experts=16, topk=2)
ROUTES = routes(12, 3, num_experts=16, topk=2)


def line(layer, indices, *, step=0, rank=0, **fields):
    record = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer, "rank": rank}
    return record | {"num_tokens": len(indices), "topk": 2, "top_indices": indices.tolist()} | fields


def forward(begin, end, *, layers=(1, 2, 3), **fields):
    return [line(layer, ROUTES[begin:end, i], **fields) for i, layer in enumerate(layers)]


TWO_STEPS = [*forward(0, 4), *forward(4, 7), *forward(7, 12, step=1)]


def write(folder, rank=0, lines=TWO_STEPS):
    folder.mkdir(exist_ok=True)
    path = folder / f"router_trace_rank{rank}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in lines))
    return path


def test_literal_lines():
    text = (
        '{"step": 3, "stage": "pre_dispatch", "block": "decoder", "layer": 1, "rank": 0, "num_tokens": 2, "topk": 2, '
    )
    text += '"top_indices": [[1, 5], [0, 7]]}'
    model = engines.ModelRoutingInfo(num_layers=2, moe_layer_numbers=(2,), num_experts=8, topk=2)
    trace = engines.megatron_trace.decode([json.loads(text)], model=model)
    assert trace.topk_indices.tolist() == [[[1, 5]], [[0, 7]]]
    assert trace.layer_numbers == (2,)
    assert trace.replay_mask.all()
    assert trace.sample_ids == ("step 3, forward 0",)
    assert trace.token_ids is None


def test_forwards_become_samples_in_their_order(tmp_path):
    path = write(tmp_path / "trace")
    for result in (path, str(path), path.parent, TWO_STEPS):
        trace = engines.megatron_trace.decode(result, model=MODEL)
        assert torch.equal(trace.topk_indices.long(), torch.from_numpy(ROUTES))
        assert trace.sequence_lengths == (4, 3, 5)
        assert trace.sample_ids == ("step 0, forward 0", "step 0, forward 1", "step 1, forward 0")
        assert trace.layer_numbers == (2, 3, 4)
    assert engines.megatron_trace.decode(path, model=MODEL, step=1).sequence_lengths == (5,)
    with pytest.raises(PayloadError, match="in step 2"):
        engines.megatron_trace.decode(path, model=MODEL, step=2)


@pytest.mark.parametrize("layers", [(1, 2, 3), (0, 1, 2)])
def test_layer_is_a_decoder_index_or_an_index_of_moe_layers(layers):
    assert engines.megatron_trace.decode(forward(0, 4, layers=layers), model=MODEL).layer_numbers == (2, 3, 4)


def test_before_0_19_layer_is_the_layer_number():
    old = [
        {k: v for k, v in record.items() if k not in ("block", "stage")} for record in forward(0, 4, layers=(2, 3, 4))
    ]
    assert engines.megatron_trace.decode(old, model=MODEL).layer_numbers == (2, 3, 4)
    with pytest.raises(PayloadError, match="layers"):
        engines.megatron_trace.decode(forward(0, 4, layers=(2, 3, 4)), model=MODEL)


def test_a_rank_of_a_pipeline_needs_its_layer_numbers():
    stage = [line(layer, ROUTES[:4, i + 1]) for i, layer in enumerate((0, 1))]
    with pytest.raises(PayloadError, match=r"layer_numbers=\.\.\."):
        engines.megatron_trace.decode(stage, model=MODEL)
    trace = engines.megatron_trace.decode(stage, model=MODEL, layer_numbers=[3, 4])
    assert trace.layer_numbers == (3, 4)
    assert torch.equal(trace.topk_indices.long(), torch.from_numpy(ROUTES[:4, 1:]))
    for wrong in ([3], [4, 3], [3, 5], [2, 3, 4], [1, 2]):
        with pytest.raises(PayloadError, match="layer_numbers"):
            engines.megatron_trace.decode(stage, model=MODEL, layer_numbers=wrong)


def test_a_folder_of_several_ranks_needs_the_rank(tmp_path):
    write(tmp_path / "trace", 0)
    write(tmp_path / "trace", 3, forward(0, 2, rank=3))
    with pytest.raises(PayloadError, match=r"ranks \[0, 3\]: pass rank="):
        engines.megatron_trace.decode(tmp_path / "trace", model=MODEL)
    assert len(engines.megatron_trace.decode(tmp_path / "trace", model=MODEL, rank=3)) == 2
    with pytest.raises(PayloadError, match="ranks"):
        engines.megatron_trace.decode(tmp_path / "trace", model=MODEL, rank=1)
    with pytest.raises(PayloadError, match="no router_trace_rank"):
        engines.megatron_trace.decode(tmp_path, model=MODEL)
    with pytest.raises(PayloadError, match=r"ranks \[0, 3\]: decode each"):
        engines.megatron_trace.decode([*forward(0, 4), *forward(4, 7, rank=3)], model=MODEL)


def test_recomputes_layer_by_layer_are_refused():
    recomputed = [*forward(0, 4), *forward(0, 4)[::-1]]
    with pytest.raises(PayloadError, match="recomputes"):
        engines.megatron_trace.decode(recomputed, model=MODEL)


@pytest.mark.parametrize("lost", range(1, 9))
def test_a_lost_line_is_refused(lost):
    with pytest.raises(PayloadError, match="forward over the layers"):
        engines.megatron_trace.decode([r for i, r in enumerate(TWO_STEPS) if i != lost], model=MODEL)


def test_a_layer_that_sends_all_tokens_to_the_same_experts_is_believed_if_asked():
    chosen = routes(32, 3, num_experts=16, topk=2)
    chosen[:, 1] = [4, 9]
    lines = [line(layer, chosen[:, i]) for i, layer in enumerate((1, 2, 3))]
    with pytest.raises(PayloadError, match=r"layers \[3\] hold the same route \[4, 9\] in all 32 rows"):
        engines.megatron_trace.decode(lines, model=MODEL)
    trace = engines.megatron_trace.decode(lines, model=MODEL, allow_constant_layers=True)
    assert torch.equal(trace.topk_indices.long(), torch.from_numpy(chosen))


def test_mtp_layers_are_left_out():
    mtp = line(0, ROUTES[:4, 0], block="mtp", mtp_idx=0)
    assert len(engines.megatron_trace.decode([*forward(0, 4), mtp], model=MODEL)) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"top_indices": [[1, 2]]},
        {"top_indices": [[1, 2, 3]] * 4},
        {"top_indices": [[1, 1]] * 4},
        {"top_indices": [[1, 16]] * 4},
        {"top_indices": [[1, -1]] * 4},
        {"top_indices": "AAAA"},
        {"top_indices": [[1.5, 2]] * 4},
        {"num_tokens": 3},
        {"num_tokens": "4"},
        {"num_tokens": 0},
        {"topk": 3},
        {"topk": True},
        {"step": None},
        {"layer": -1},
        {"rank": 1},
        {"block": "encoder"},
    ],
)
def test_damaged_lines_are_refused(change):
    lines = forward(0, 4)
    lines[1] |= change
    with pytest.raises(PayloadError):
        engines.megatron_trace.decode(lines, model=MODEL)


@pytest.mark.parametrize("text", ["", "[]\n", "3\n", '{"step": 0}\n', "{", "[" * 100_000, "\udcff"])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "router_trace_rank0.jsonl"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(PayloadError):
        engines.megatron_trace.decode(path, model=MODEL)
    with pytest.raises(PayloadError, match="cannot be read"):
        engines.megatron_trace.decode(tmp_path / "nowhere.jsonl", model=MODEL)


def test_a_cut_file_names_the_line(tmp_path):
    path = write(tmp_path / "trace")
    path.write_text(path.read_text()[:-20])
    with pytest.raises(PayloadError, match="line 9 is no JSON"):
        engines.megatron_trace.decode(path, model=MODEL)


def test_files_that_megatrons_own_tracer_writes(tmp_path):
    """Hooks on routers and the recorder of inference, of the Megatron-Core that is installed (0.19 and later have them)."""
    router_trace = pytest.importorskip("megatron.core.transformer.moe.router_trace")
    tracer = router_trace.RouterTracer(str(tmp_path / "hooks"), max_steps=10, rank=2, training_mode=True)
    routing = torch.from_numpy(ROUTES)
    for begin, end in ((0, 4), (4, 12)):
        for i in range(3):
            chosen = torch.zeros(end - begin, 16, dtype=torch.bool).scatter_(1, routing[begin:end, i], True)
            identity = router_trace._parse_router_module_name(f"decoder.layers.{i + 1}.mlp.router")
            tracer._record(SimpleNamespace(topk=2), (), (chosen.float(), chosen), identity)
    tracer.advance_step(7)
    by_hooks = engines.megatron_trace.decode(tmp_path / "hooks", model=MODEL)
    assert by_hooks.sequence_lengths == (4, 8)
    assert by_hooks.sample_ids == ("step 7, forward 0", "step 7, forward 1")
    assert torch.equal(by_hooks.topk_indices.long(), routing.sort(dim=2)[0])

    tracer = router_trace.RouterTracer(str(tmp_path / "recorder"), max_steps=10, rank=2)
    tracer.record_indices(routing)
    tracer.flush()
    recorded = engines.megatron_trace.decode(tmp_path / "recorder", model=MODEL)
    assert torch.equal(recorded.topk_indices.long(), routing)
