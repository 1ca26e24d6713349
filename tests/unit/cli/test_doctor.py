"""`router-replay doctor`: the environment, and configs of Hugging Face and of Megatron-Core."""

import json
from pathlib import Path

import pytest

from tests.unit.cli.runner import call

CAPTURES = Path(__file__).parents[1] / "data" / "engine_captures"


def test_doctor_of_the_environment_and_of_a_hugging_face_config(folder):
    assert json.loads(call("doctor", "--json").output)["environment"]["packages"]["torch"]["version"]
    values = json.loads(call("doctor", "--config", CAPTURES / "configs" / "qwen3moe.json", "--json").output)["model"]
    assert (values["replayed_layers"], values["topk"], values["num_experts"]) == ([1, 3, 4], 2, 8)
    Path("unknown.json").write_text('{"model_type": "mystery_moe"}')
    assert "mystery_moe" in call("doctor", "--config", "unknown.json", code=2).stderr


@pytest.mark.parametrize(("version", "newer"), [("0.16.1", False), ("0.19.2", False), ("0.20.0", True)])
def test_doctor_asks_megatron_core_itself_for_its_version(folder, monkeypatch, version, newer):
    # pip's metadata may be that of another installation beside the one that is imported.
    monkeypatch.setattr("megatron.core.__version__", version)
    environment = json.loads(call("doctor", "--json").output)["environment"]
    assert environment["packages"]["megatron-core"]["version"] == version
    assert environment["notes"][0] == "sessions were run with Megatron-Core 0.16.1, 0.17.1, 0.18.2, 0.19.2"
    assert ["newer" in note for note in environment["notes"][1:]] == [True] * newer


MEGATRON = {"num_layers": 5, "num_moe_experts": 16, "moe_router_topk": 4, "moe_layer_freq": "[0]*1+[1]*4"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"moe_router_fusion": True}, ""),
        ({"moe_router_fusion": True, "moe_router_score_function": "sqrtsoftplus"}, ""),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing=True"),
        ({"moe_expert_capacity_factor": 1.0}, "moe_token_drop_policy='probs'"),
        ({"moe_expert_capacity_factor": 4.0}, ""),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": ["moe_router"]}, "cuda_graph_impl"),
        ({"moe_n_hash_layers": 2}, "layers [2]: moe_n_hash_layers=2"),
        ({"mtp_num_layers": 1}, ""),
    ],
)
def test_doctor_of_a_megatron_config_names_what_is_refused(folder, changes, reason):
    Path("megatron.json").write_text(json.dumps({"args": MEGATRON | changes}))
    values = json.loads(call("doctor", "--config", "megatron.json", "--json", code=1 if reason else 0).output)["model"]
    assert values["moe_layers"] == [2, 3, 4, 5]
    assert len(values["refused"]) == bool(reason)
    assert reason in "".join(values["refused"])
    assert call("doctor", "--config", "megatron.json", code=1 if reason else 0).output.count("refused:") == bool(reason)


def test_doctor_of_a_hybrid_config_reads_the_pattern(folder):
    hybrid = {"num_layers": 6, "num_moe_experts": 16, "moe_router_topk": 4, "hybrid_layer_pattern": "MEM|*E-/ME"}
    Path("hybrid.json").write_text(json.dumps(hybrid))
    values = json.loads(call("doctor", "--config", "hybrid.json", "--json").output)["model"]
    assert values["moe_layers"] == [2, 5]
    Path("hybrid.json").write_text(json.dumps(hybrid | {"hybrid_layer_pattern": "ME"}))
    assert "names 2 layers" in call("doctor", "--config", "hybrid.json", code=2).stderr


@pytest.mark.parametrize(
    "broken", [{}, {"num_layers": 3}, MEGATRON | {"moe_layer_freq": "import os"}, [1], MEGATRON | {"num_layers": "x"}]
)
def test_doctor_of_a_config_that_is_none(folder, broken):
    Path("broken.json").write_text(json.dumps(broken))
    assert "broken.json" in call("doctor", "--config", "broken.json", code=2).stderr
