import json

import pytest

from megatron_router_replay.engines import ModelRoutingInfo
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import DATA, config

read = ModelRoutingInfo.from_hf_config


def facts(info):
    return info.num_layers, info.moe_layer_numbers, info.num_experts, info.topk, info.num_shared_experts


def test_reads_a_dict_a_file_and_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config("qwen3moe")))
    expected = (4, (1, 3, 4), 8, 2, 0)
    assert facts(read(config("qwen3moe"))) == expected
    assert facts(read(tmp_path)) == facts(read(str(tmp_path / "config.json"))) == expected
    assert facts(read(DATA / "configs" / "mixtral.json")) == (3, (1, 2, 3), 4, 2, 0)


QWEN3 = {"model_type": "qwen3_moe", "num_hidden_layers": 6, "num_experts": 128, "num_experts_per_tok": 8}
DEEPSEEK = {"num_hidden_layers": 5, "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1}


def test_qwen3_moe_sparse_step_and_dense_layers():
    assert read(QWEN3 | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}).moe_layer_numbers == (2, 6)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "kimi_k2", "glm4_moe"])
def test_first_layers_are_dense(model_type):
    values = DEEPSEEK | {"model_type": model_type, "first_k_dense_replace": 2}
    assert facts(read(values)) == (5, (3, 4, 5), 384, 8, 1)
    assert read(values | {"moe_layer_freq": 2}).moe_layer_numbers == (3, 5)
    assert read(values | {"moe_layer_freq": [1, 0, 0, 1, 1]}).moe_layer_numbers == (4, 5)


def test_multimodal_and_qwen3_5_configs_are_read_through_text_config():
    text = {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 3, "num_experts": 512, "num_experts_per_tok": 10}
    assert facts(read({"model_type": "qwen3_5_moe", "text_config": text})) == (3, (1, 2, 3), 512, 10, 1)
    kimi = DEEPSEEK | {"model_type": "kimi_k2", "first_k_dense_replace": 1}
    assert read({"model_type": "kimi_k25", "text_config": kimi}).moe_layer_numbers == (2, 3, 4, 5)


def test_nemotron_h_patterns():
    values = {"model_type": "nemotron_h", "hybrid_override_pattern": "MEM*E-", "num_hidden_layers": 6}
    values |= {"n_routed_experts": 512, "num_experts_per_tok": 22, "n_shared_experts": 1}
    assert facts(read(values)) == (6, (2, 5), 512, 22, 1)
    names = ["mamba", "moe", "mamba", "attention", "moe", "mlp"]
    assert read(values | {"hybrid_override_pattern": None, "layers_block_type": names}).moe_layer_numbers == (2, 5)
    with pytest.raises(PayloadError, match="'MEX'"):
        read(values | {"hybrid_override_pattern": "MEX"})
    with pytest.raises(PayloadError, match="disagree"):
        read(values | {"layers_block_type": [*names[1:], "mlp"]})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model_type": "llama"}, "'llama' is not known"),
        ({}, "no model_type"),
        ({"model_type": "m", "text_config": {}}, "no model_type"),
        (QWEN3, "decoder_sparse_step=None"),
        (QWEN3 | {"decoder_sparse_step": 1}, "mlp_only_layers=None"),
        (QWEN3 | {"decoder_sparse_step": 1, "mlp_only_layers": [6]}, r"mlp_only_layers=\[6\]"),
        (DEEPSEEK | {"model_type": "deepseek_v3"}, "first_k_dense_replace=None"),
        (DEEPSEEK | {"model_type": "deepseek_v3", "first_k_dense_replace": 5}, "it is dense"),
        (
            {"model_type": "mixtral", "num_hidden_layers": 2, "num_experts_per_tok": 2},
            "num_experts / num_local_experts",
        ),
        ({"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 2, "num_experts_per_tok": 3}, "topk=3"),
        (config("qwen3moe") | {"num_experts": 16}, "contradicts itself"),
        ({"model_type": "gpt_oss", "num_local_experts": 2, "num_experts_per_tok": 1}, "num_hidden_layers=None"),
    ],
)
def test_what_is_missing_or_unknown_is_named_never_guessed(values, named):
    with pytest.raises(PayloadError, match=named):
        read(values)


def test_an_unreadable_config_raises_by_name(tmp_path):
    with pytest.raises(PayloadError, match="nowhere"):
        read(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(PayloadError, match="holds list"):
        read(tmp_path)
    with pytest.raises(PayloadError, match="got int"):
        read(3)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("Qwen3MoeConfig", {"num_hidden_layers": 4, "mlp_only_layers": [1]}, (4, (1, 3, 4), 128, 8, 0)),
        ("Qwen3NextConfig", {"num_hidden_layers": 2}, (2, (1, 2), 512, 10, 1)),
        ("Qwen3_5MoeTextConfig", {"num_hidden_layers": 2}, (2, (1, 2), 256, 8, 1)),
        ("MixtralConfig", {"num_hidden_layers": 2}, (2, (1, 2), 8, 2, 0)),
        ("DeepseekV3Config", {"num_hidden_layers": 5}, (5, (4, 5), 256, 8, 1)),
        ("Glm4MoeConfig", {"num_hidden_layers": 3}, (3, (2, 3), 128, 8, 1)),
        ("GptOssConfig", {"num_hidden_layers": 2}, (2, (1, 2), 128, 4, 0)),
        ("Llama4TextConfig", {"num_hidden_layers": 4, "interleave_moe_layer_step": 2}, (4, (2, 4), 16, 1, 1)),
        ("NemotronHConfig", {}, (4, (2,), 8, 2, 1)),
    ],
)
def test_agrees_with_the_config_classes_of_transformers(name, changes, expected):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    assert facts(read(getattr(transformers, name)(**changes))) == expected


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("Qwen3MoeConfig", {"mlp_only_layers": [1], "num_experts": 8, "moe_intermediate_size": 16}),
        ("MixtralConfig", {"num_local_experts": 4}),
        (
            "DeepseekV3Config",
            {
                "first_k_dense_replace": 2,
                "n_routed_experts": 8,
                "moe_intermediate_size": 16,
                "n_group": 1,
                "topk_group": 1,
            },
        ),
        ("Glm4MoeConfig", {"first_k_dense_replace": 1, "n_routed_experts": 8, "moe_intermediate_size": 16}),
        ("GptOssConfig", {"num_local_experts": 4}),
    ],
)
def test_moe_layers_are_those_where_transformers_builds_a_router(name, changes):
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 16, "vocab_size": 32, "num_experts_per_tok": 2, "head_dim": 16}
    built = getattr(transformers, name)(**(sizes | changes))
    model = transformers.AutoModelForCausalLM.from_config(built)
    routers = [n for n, module in model.named_modules() if type(module).__name__.lower().endswith("topkrouter")]
    assert read(built).moe_layer_numbers == tuple(int(n.split("layers.")[1].split(".")[0]) + 1 for n in routers)
