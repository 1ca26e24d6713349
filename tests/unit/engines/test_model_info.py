import json
import re
from importlib import import_module

import pytest
import torch

from megatron_router_replay.engines import ModelRoutingInfo
from megatron_router_replay.errors import PayloadError
from tests.unit.engines.engine_payloads import DATA, config

read = ModelRoutingInfo.from_hf_config


def facts(info):
    return info.num_layers, info.moe_layer_numbers, info.num_experts, info.topk


def test_reads_a_dict_a_file_and_a_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config("qwen3moe")))
    expected = (4, (1, 3, 4), 8, 2)
    assert facts(read(config("qwen3moe"))) == expected
    assert facts(read(tmp_path)) == facts(read(str(tmp_path / "config.json"))) == expected
    assert facts(read(DATA / "configs" / "mixtral.json")) == (3, (1, 2, 3), 4, 2)


QWEN3 = {"model_type": "qwen3_moe", "num_hidden_layers": 6, "num_experts": 128, "num_experts_per_tok": 8}
DEEPSEEK = {"num_hidden_layers": 5, "n_routed_experts": 384, "num_experts_per_tok": 8, "n_shared_experts": 1}


def test_nemotron_h_patterns():
    values = {"model_type": "nemotron_h", "hybrid_override_pattern": "MEM*E-", "num_hidden_layers": 6}
    values |= {"n_routed_experts": 512, "num_experts_per_tok": 22, "n_shared_experts": 1}
    assert facts(read(values)) == (6, (2, 5), 512, 22)
    names = ["mamba", "moe", "mamba", "attention", "moe", "mlp"]
    assert read(values | {"hybrid_override_pattern": None, "layers_block_type": names}).moe_layer_numbers == (2, 5)
    with pytest.raises(PayloadError, match="'MEX'"):
        read(values | {"hybrid_override_pattern": "MEX"})
    with pytest.raises(PayloadError, match="disagree"):
        read(values | {"layers_block_type": [*names[1:], "mlp"]})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model_type": "llama"}, r"'llama' .*ModelRoutingInfo\(num_layers=\.\.\., moe_layer_numbers=\[\.\.\.\], num_exp"),
        (DEEPSEEK | {"model_type": "new"}, r"\(num_layers=5, moe_layer_numbers=\[\.\.\.\], num_experts=384, topk=8\)"),
        ({"model_type": "gemma4_text", "num_hidden_layers": 2, "enable_moe_block": False}, "enable_moe_block=False: .*dense"),
        ({}, "no model_type"),
        (QWEN3, "decoder_sparse_step=None"),
        (QWEN3 | {"decoder_sparse_step": 1}, "mlp_only_layers=None"),
        (QWEN3 | {"decoder_sparse_step": 1, "mlp_only_layers": [6]}, r"mlp_only_layers=\[6\]"),
        (DEEPSEEK | {"model_type": "deepseek_v3"}, "lacks mlp_layer_types / first_k_dense_replace"),
        (DEEPSEEK | {"model_type": "deepseek_v3", "first_k_dense_replace": 5}, "it is dense"),
        (DEEPSEEK | {"model_type": "deepseek_v3", "moe_layer_freq": [1, 1]}, "freq must name 5 layers, .*got .1, 1."),
        ({"model_type": "mixtral", "num_hidden_layers": 2, "num_experts_per_tok": 2}, "num_experts / num_local_experts"),
        ({"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 2, "num_experts_per_tok": 3}, "topk=3"),
        ({"model_type": "mixtral", "num_hidden_layers": 0}, "num_hidden_layers=0 of the config must lie in 1..65536"),
        ({"model_type": "mixtral", "num_hidden_layers": 2, "mlp_only_layers": [0]}, r"has mlp_only_layers=\[0\]"),
        (config("qwen3moe") | {"num_experts": 16}, "contradicts itself"),
        ({"model_type": "step3p5", "num_hidden_layers": 5}, "lacks mlp_layer_types / moe_layers_enum:"),
        ({"model_type": "deepseek_v3", "moe_layer_freq": [0, 1]}, "num_hidden_layers=None"),
        ({"model_type": "step3p5", "num_hidden_layers": 5, "moe_layers_enum": "3,x"}, "moe_layers_enum='3,x', expected"),
        ({"model_type": "deepseek_v4", "num_hidden_layers": 2, "num_hash_layers": 1, "mlp_layer_types": ["moe", "moe"]},
         "mlp_layer_types and num_hash_layers of the deepseek_v4 config disagree"),
        ({"model_type": "jamba", "num_hidden_layers": 2, "expert_layer_period": 0}, "period=0, expected .* of 1 or more"),
        ({"model_type": "hunyuan_v1_moe", "num_hidden_layers": 2, "num_experts": 8, "moe_topk": [2, 1]},
         r"moe_topk=\[2, 1\]"),
    ],
)  # fmt: skip
def test_what_is_missing_or_unknown_is_named_never_guessed(values, named):
    with pytest.raises(PayloadError, match=named):
        read(values)


def test_an_unreadable_config_raises_by_name(tmp_path):
    with pytest.raises(PayloadError, match="nowhere"):
        read(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(PayloadError, match="holds list"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PayloadError, match="cannot read the model config"):
        read(tmp_path)
    with pytest.raises(PayloadError, match="got int"):
        read(3)


def test_numbers_of_layers_increase_and_lie_in_the_model():
    for numbers in ((1, 1), (2, 1), (0, 1), (1, 5)):
        with pytest.raises(PayloadError, match=r"must increase within 1..num_layers=4"):
            ModelRoutingInfo(num_layers=4, moe_layer_numbers=numbers, num_experts=8, topk=2)
    for numbers in (1, (1.0, 2.0), ("1",), (True,)):
        with pytest.raises(PayloadError, match=r"MRR101: .* must be an? (list|integer)"):
            ModelRoutingInfo(num_layers=4, moe_layer_numbers=numbers, num_experts=8, topk=2)


BUILT = [
    *((name, {}) for name in (
        "Qwen3NextConfig MixtralConfig OlmoeConfig FlexOlmoConfig PhimoeConfig GptOssConfig DeepseekV3Config "
        "GraniteMoeConfig GraniteMoeSharedConfig GraniteMoeHybridConfig MiniMaxConfig MiniMaxM2Config DeepseekV4Config "
        "KimiLinearConfig BailingHybridConfig MiMoV2FlashConfig ExaoneMoeConfig Glm4MoeConfig Glm4MoeLiteConfig "
        "AXK1Config BeamConfig GraniteMoeSWAConfig HYV3Config LagunaConfig MellumConfig").split()),
    ("Qwen3MoeConfig", {"mlp_only_layers": [1]}),
    ("MiniMaxM3VLTextConfig", {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 4}),
    ("HunYuanMoEV1Config", {"num_experts": 8, "moe_topk": 2}),
    ("LongcatFlashConfig", {"num_layers": 3}),
    ("Dots1Config", {"first_k_dense_replace": 2, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}),
    ("Ernie4_5_MoeConfig", {"moe_layer_start_index": 2, "moe_layer_end_index": 4}),
    ("Ernie4_5_MoeConfig", {"moe_layer_interval": 2}),
    ("AfmoeConfig", {"num_dense_layers": 2}),
    ("Lfm2MoeConfig", {"num_dense_layers": 2, "layer_types": ["full_attention"] * 6}),
    ("JambaConfig", {"expert_layer_period": 3, "expert_layer_offset": 1}),
    ("Cohere2MoeConfig", {"first_k_dense_replace": 2}),
    ("InklingTextConfig", {"dense_mlp_idx": 2}),
    *((name, {}) for name in "Glm5NextTextConfig Dots3NoteTextConfig HYV4Config MuseSparkTextConfig".split()),
    ("Qwen4ExpTextConfig", {"layer_types": ["linear_attention"] * 6}),
    *((name, {"mlp_layer_types": ["dense"] + ["sparse"] * 5, "num_experts_per_tok": 2})
      for name in ("DeepseekOcr2TextConfig", "UnlimitedOcrTextConfig")),
    ("AriaTextConfig", {}),
    ("Gemma4TextConfig", {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes"), BUILT)
def test_moe_layers_are_those_where_transformers_builds_experts(name, changes):
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, name):
        pytest.skip(f"this transformers has no {name}")
    sizes = {"num_hidden_layers": 6, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"intermediate_size": 32, "head_dim": 16, "vocab_size": 256_000}
    built = getattr(transformers, name)(**(sizes | changes))
    modeling = import_module(type(built).__module__.replace("configuration", "modeling"))
    with torch.device("meta"):
        model = getattr(modeling, name.replace("Config", "Model"))._from_config(built)
    layers = {kind: {layer_of(module_name) for module_name, module in model.named_modules()
                     if type(module).__name__.endswith(kind)} for kind in ("Experts", "HashRouter")}  # fmt: skip
    experts = next(module for module in model.modules() if type(module).__name__.endswith("Experts"))
    info = read(built)
    # The first layers of DeepSeek-V4 route by a table of tokens.
    assert list(info.moe_layer_numbers) == sorted(layers["Experts"] - layers["HashRouter"] - {None})
    assert info.num_experts == next(experts.parameters()).shape[0]
    if name != "Gemma4TextConfig":  # its router reads the config in each forward
        assert {module.top_k for module in model.modules() if hasattr(module, "top_k")} == {info.topk}


def layer_of(module_name):
    found = re.search(r"layers\.(\d+)", module_name)
    return int(found[1]) + 1 if found else None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        *((DEEPSEEK | {"model_type": name, "first_k_dense_replace": 2}, (5, (3, 4, 5), 384, 8))
          for name in ("deepseek_v3", "kimi_k2", "glm4_moe")),
        (DEEPSEEK | {"model_type": "kimi_k2", "first_k_dense_replace": 2, "moe_layer_freq": 2}, (5, (3, 5), 384, 8)),
        (DEEPSEEK | {"model_type": "kimi_k2", "first_k_dense_replace": 2, "moe_layer_freq": [1, 0, 0, 1, 1]},
         (5, (4, 5), 384, 8)),
        ({"model_type": "kimi_k25", "text_config": DEEPSEEK | {"model_type": "kimi_k2", "first_k_dense_replace": 1}},
         (5, (2, 3, 4, 5), 384, 8)),
        ({"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 3,
          "num_experts": 512, "num_experts_per_tok": 10}}, (3, (1, 2, 3), 512, 10)),
        ({"model_type": "step3p5", "num_hidden_layers": 5, "moe_layers_enum": "3,4,5", "moe_num_experts": 288,
          "moe_top_k": 8}, (5, (4, 5), 288, 8)),
        ({"model_type": "bailing_moe_v2", "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_experts": 256,
          "num_experts_per_tok": 8, "num_shared_experts": 1}, (3, (2, 3), 256, 8)),
        ({"model_type": "minimax_m3", "num_hidden_layers": 3, "moe_layer_freq": [0, 1, 1], "num_local_experts": 128,
          "num_experts_per_tok": 4}, (3, (2, 3), 128, 4)),
        ({"model_type": "deepseek_v4", "num_hidden_layers": 4, "num_hash_layers": 3, "n_routed_experts": 256,
          "num_experts_per_tok": 6, "n_shared_experts": 1}, (4, (4,), 256, 6)),
        ({"model_type": "llama4_text", "num_hidden_layers": 4, "interleave_moe_layer_step": 2, "num_local_experts": 16,
          "num_experts_per_tok": 1}, (4, (2, 4), 16, 1)),
        (DEEPSEEK | {"model_type": "joyai_llm_flash", "first_k_dense_replace": 1}, (5, (2, 3, 4, 5), 384, 8)),
        ({"model_type": "inkling_mm_model", "text_config": DEEPSEEK | {"model_type": "inkling_model", "dense_mlp_idx": 2}},
         (5, (3, 4, 5), 384, 8)),
        ({"model_type": "qwen3_omni_moe", "thinker_config": {"model_type": "x", "text_config": {
            "model_type": "qwen3_omni_moe_text", "num_hidden_layers": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "num_experts": 128, "num_experts_per_tok": 8}}}, (2, (1, 2), 128, 8)),
    ],
)  # fmt: skip
def test_configs_that_transformers_does_not_write_or_that_stand_in_text_config(values, expected):
    assert facts(read(values)) == expected
