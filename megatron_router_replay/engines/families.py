"""The hidden layers with routed experts of a Hugging Face model, by its model_type: read off each model's own code.

`FAMILIES` names the rules of each model_type; a rule turns the config's fields into [is MoE] for each hidden layer. A config
that states its layers in several ways must state the same. A model type that is not listed here raises: nothing is guessed. A
test compares the rules with the routers that transformers 5.23 builds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_router_replay.errors import PayloadError

Config = Mapping[str, Any]
LayerRule = Callable[[Config, int], list[bool] | None]
"""A config and its number of layers -> which of them route, or None where its field is not enough."""

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The fields that count the routed experts of a layer; all that a config has must agree."""

TOPK = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)
"""The fields that count the experts of a token; all that a config has must agree."""


def moe_layers(config: Config) -> list[bool]:
    """Return which hidden layers of a config route; its model_type must be one of `FAMILIES`.

    Raises:
        PayloadError: the config does not say it, or contradicts itself.
    """
    model_type = config["model_type"]
    name = "num_layers" if model_type == "longcat_flash" else "num_hidden_layers"
    spelled = config.get("hybrid_override_pattern") or config.get("layers_block_type")
    # The pattern of a Nemotron-H names every layer, and some of its configs have no number.
    if model_type == "nemotron_h" and config.get(name) is None and isinstance(spelled, (str, list, tuple)):
        config = {**config, name: len(spelled)}
    num_layers = integer(config, name)
    # Lists of this length are made before ModelRoutingInfo checks it.
    if not 1 <= num_layers <= 65536:
        raise PayloadError(f"MRR303: {name}={num_layers} of the config must lie in 1..65536.")
    rules = FAMILIES[model_type]
    answers = {
        field: rule(config, num_layers) for field, rule in rules.items() if not field or config.get(field) is not None
    }
    stated = {field: answer for field, answer in answers.items() if answer is not None}
    if not stated:
        raise PayloadError(
            f"MRR303: the {model_type} config lacks {' / '.join(rules)}: which layers route is unknown. Give the model's "
            "complete config.json."
        )
    first, *others = stated.values()
    if any(answer != first for answer in others):
        raise PayloadError(f"MRR303: {' and '.join(stated)} of the {model_type} config disagree.")
    return first


def integer(config: Config, name: str, default: int | None = None, least: int | None = None) -> int:
    """Return an integer of a config; `default` where it is absent or null."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "" if least is None else f" of {least} or more"
        raise PayloadError(
            f"MRR303: the {config.get('model_type')} config has {name}={value!r}, expected an integer{bound}. "
            "Give the model's complete config.json."
        )
    return value


def agreed(config: Config, names: tuple[str, ...]) -> int:
    """Return the integer that is stored under one or more of `names`; one at least must be there, all must agree."""
    stated = {name: integer(config, name) for name in names if config.get(name) is not None}
    if not stated:
        raise PayloadError(f"MRR303: the {config.get('model_type')} config lacks {' / '.join(names)}.")
    if len(set(stated.values())) > 1:
        raise PayloadError(f"MRR303: the {config.get('model_type')} config contradicts itself: {stated}.")
    return next(iter(stated.values()))


def _listed(config: Config, name: str, num_layers: int) -> list[bool]:
    """Return which layers a list of their indices from 0 names."""
    indices = config.get(name)
    if not isinstance(indices, (list, tuple)):
        raise PayloadError(f"MRR303: the {config.get('model_type')} config has {name}={indices!r}, expected a list.")
    if not all(type(i) is int and 0 <= i < num_layers for i in indices):
        raise PayloadError(f"MRR303: {name}={indices} of the config do not fit {num_layers} layers.")
    return [i in indices for i in range(num_layers)]


def _kinds(name: str, moe: Any, *others: Any) -> LayerRule:
    """Return the rule of a list, or a text, with the kind of each layer."""

    def rule(config: Config, num_layers: int) -> list[bool]:
        kinds, known = config[name], (moe, *others)
        is_list = isinstance(kinds, (str, list, tuple))
        if not is_list or len(kinds) != num_layers or not all(kind in known for kind in kinds):
            raise PayloadError(
                f"MRR303: {name} must name {num_layers} layers, each one of {list(known)}, got {kinds!r}."
            )
        return [kind == moe for kind in kinds]

    return rule


def _from(name: str) -> LayerRule:
    """Return the rule of a number of layers in front that do not route."""
    return lambda config, num_layers: [i >= integer(config, name) for i in range(num_layers)]


def _every_layer(config: Config, num_layers: int) -> list[bool]:
    """Source: transformers 5.23, MixtralDecoderLayer, GptOssDecoderLayer, Qwen3_5MoeDecoderLayer: no dense layers."""
    # A config that names dense layers contradicts its own model_type, and is not guessed at.
    if config.get("mlp_only_layers"):
        raise PayloadError(
            f"MRR303: a {config['model_type']} has routed experts in every layer, and its config has mlp_only_layers="
            f"{config['mlp_only_layers']}."
        )
    return [True] * num_layers


def _switched(config: Config, num_layers: int) -> list[bool]:
    """Source: transformers 5.23, Gemma4TextDecoderLayer: experts beside the MLP of every layer, or of none."""
    if config["enable_moe_block"] is not True:
        raise PayloadError(
            f"MRR303: the {config['model_type']} config has enable_moe_block={config['enable_moe_block']}: the model is "
            "dense and has no routes to replay."
        )
    return [True] * num_layers


def _sparse_step(config: Config, num_layers: int) -> list[bool]:
    """Source: transformers 5.23, Qwen3MoeDecoderLayer.__init__."""
    step, dense = integer(config, "decoder_sparse_step", least=1), _listed(config, "mlp_only_layers", num_layers)
    return [not dense[i] and (i + 1) % step == 0 for i in range(num_layers)]


def _first_dense(config: Config, num_layers: int) -> list[bool]:
    """Source: vLLM 0.22, DeepseekV2DecoderLayer.__init__."""
    first = integer(config, "first_k_dense_replace", 0)
    if isinstance(config.get("moe_layer_freq"), (list, tuple)):
        routed = _kinds("moe_layer_freq", 1, 0)(config, num_layers) or []
    else:
        # Absent means 1: the field is optional in every reader of these configs, and transformers 5 does not write it.
        step = integer(config, "moe_layer_freq", 1, least=1)
        routed = [i % step == 0 for i in range(num_layers)]
    return [i >= first and routed[i] for i in range(num_layers)]


def _layer_freq(config: Config, num_layers: int) -> list[bool] | None:
    """A list of layers is complete, and some configs have nothing else; a number alone is not."""
    return _first_dense(config, num_layers) if isinstance(config["moe_layer_freq"], (list, tuple)) else None


def _interleaved(config: Config, num_layers: int) -> list[bool]:
    """Source: transformers 5.23, Llama4TextConfig.__post_init__."""
    if config.get("moe_layers") is not None:
        return _listed(config, "moe_layers", num_layers)
    step = integer(config, "interleave_moe_layer_step", least=1)
    return [(i + 1) % step == 0 for i in range(num_layers)]


def _periodic(config: Config, num_layers: int) -> list[bool]:
    """Source: transformers 5.23, JambaConfig.layers_num_experts."""
    period, offset = integer(config, "expert_layer_period", least=1), integer(config, "expert_layer_offset")
    return [i % period == offset for i in range(num_layers)]


def _span(config: Config, num_layers: int) -> list[bool]:
    """Source: transformers 5.23, Ernie4_5_MoeDecoderLayer.__init__ (an end of -1 is the last layer)."""
    interval = integer(config, "moe_layer_interval", least=1)
    start, end = integer(config, "moe_layer_start_index"), integer(config, "moe_layer_end_index", -1)
    end = num_layers - 1 if end == -1 else end
    return [(i + 1) % interval == 0 and start <= i <= end for i in range(num_layers)]


def _enumerated(config: Config, num_layers: int) -> list[bool]:
    """Source: transformers 5.23, Step3p7TextConfig (`moe_layers_enum` of released configs: "3,4,5")."""
    layers = config["moe_layers_enum"]
    if isinstance(layers, str) and all(item.strip().isdecimal() for item in layers.split(",")):
        layers = [int(item) for item in layers.split(",")]
    # Numbers above the last layer are those of multi-token prediction.
    return _listed({**config, "moe_layers_enum": layers}, "moe_layers_enum", 1 << 20)[:num_layers]


_MLP_TYPES = _kinds("mlp_layer_types", "sparse", "dense")
# Source: NVIDIA's configuration_nemotron_h.py (M mamba, * attention, - MLP, E experts).
_PATTERN = _kinds("hybrid_override_pattern", "E", *"M*-")
_NEMOTRON = _kinds("layers_block_type", "moe", "mamba", "linear_attention", "attention", "full_attention", "mlp")

_RULES: list[tuple[str, dict[str, LayerRule]]] = [
    ("qwen2_moe qwen3_moe qwen3_next qwen3_vl_moe_text qwen3_omni_moe_text", {"": _sparse_step}),
    ("mixtral gpt_oss olmoe flex_olmo phimoe minimax minimax_m2 qwen3_5_moe_text", {"": _every_layer}),
    ("granitemoe granitemoeshared granitemoehybrid granitemoe_swa hunyuan_v1_moe longcat_flash", {"": _every_layer}),
    ("aria_text qwen4_exp_text", {"": _every_layer}),
    (
        "deepseek_v2 deepseek_v3 deepseek_v32 kimi_k2 kimi_linear dots1 mimo_v2_flash exaone_moe minimax_m3 "
        "minimax_m3_vl_text bailing_moe bailing_moe_v2 bailing_hybrid glm4_moe glm4v_moe_text glm4_moe_lite glm_moe_dsa "
        "glm5_next_text axk1 beam cohere2_moe deepseek_ocr2_text unlimited_ocr_text dots3_note_text hy_v3 hy_v4 laguna "
        # The bridge of miles reads JoyAI-LLM-Flash as a DeepSeek-V3.
        "mellum muse_spark_text joyai_llm_flash",
        {"mlp_layer_types": _MLP_TYPES, "first_k_dense_replace": _first_dense, "moe_layer_freq": _layer_freq},
    ),
    # The first layers route by a table of token ids: no router chooses there. Engines send zeros, or the table's ids.
    (
        "deepseek_v4",
        {
            "mlp_layer_types": _kinds("mlp_layer_types", "moe", "hash_moe"),
            "num_hash_layers": _from("num_hash_layers"),
            "moe_n_hash_layers": _from("moe_n_hash_layers"),
        },
    ),
    ("step3p5 step3p7_text", {"mlp_layer_types": _MLP_TYPES, "moe_layers_enum": _enumerated}),
    ("afmoe lfm2_moe", {"": _from("num_dense_layers")}),
    ("inkling_text inkling_model", {"mlp_layer_types": _MLP_TYPES, "dense_mlp_idx": _from("dense_mlp_idx")}),
    ("gemma4_text", {"enable_moe_block": _switched}),
    ("ernie4_5_moe", {"": _span}),
    ("jamba", {"": _periodic}),
    ("llama4_text", {"": _interleaved}),
    ("nemotron_h", {"hybrid_override_pattern": _PATTERN, "layers_block_type": _NEMOTRON}),
]

FAMILIES: Mapping[str, dict[str, LayerRule]] = {name: rules for names, rules in _RULES for name in names.split()}
"""model_type -> field -> the rule of which hidden layers route; it applies where its field is there, that of "" always."""
