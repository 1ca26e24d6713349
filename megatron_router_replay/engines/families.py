"""Which hidden layers of a Hugging Face model have routed experts, by its model_type: read off each model's own code.

A family says which rules turn a config's fields into [is MoE] for each hidden layer, and which fields count experts. A config
that states its layers in several ways must state the same. A model type that is not listed here raises: nothing is guessed. A
test compares the rules with the routers that transformers 5.23 builds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_router_replay.errors import PayloadError

Config = Mapping[str, Any]
LayerRule = Callable[[Config, int], list[bool] | None]
"""A config and its number of layers -> which of them route, or None where its field says nothing."""


_NAMES_EVERY_LAYER = ("hybrid_override_pattern", "layers_block_type")


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How to read the configs of one kind of architecture.

    Args:
        layers: field -> the rule of which hidden layers route; it is asked where its field is there, that of "" always.
        num_layers: the field that counts hidden layers.
        num_experts, topk: the fields that count them; all that are there must agree.
        shared_experts: how many there are, or the field that counts them (null and absent: none).
    """

    layers: Mapping[str, LayerRule]
    num_layers: str = "num_hidden_layers"
    num_experts: tuple[str, ...] = ("num_experts", "num_local_experts")
    topk: tuple[str, ...] = ("num_experts_per_tok", "experts_per_token")
    shared_experts: int | str = 0

    def moe_layers(self, config: Config) -> list[bool]:
        """Return which hidden layers of a config route.

        Raises:
            PayloadError: the config does not say it, or contradicts itself.
        """
        # A hybrid's pattern names every layer, and some of these configs have no number.
        spelled = [config.get(name) for name in self.layers if name in _NAMES_EVERY_LAYER]
        lengths = [len(value) for value in spelled if isinstance(value, (str, list, tuple))]
        is_spelled = config.get(self.num_layers) is None and lengths
        num_layers = lengths[0] if is_spelled else integer(config, self.num_layers)
        # Lists of this length are made before ModelRoutingInfo checks it.
        if not 1 <= num_layers <= 65536:
            raise PayloadError(f"MRR303: {self.num_layers}={num_layers} of the config must lie in 1..65536.")
        asked = {name: rule for name, rule in self.layers.items() if not name or config.get(name) is not None}
        answers = {name: rule(config, num_layers) for name, rule in asked.items()}
        stated = {name: answer for name, answer in answers.items() if answer is not None}
        if not stated:
            raise PayloadError(
                f"MRR303: the {config.get('model_type')} config lacks {' / '.join(self.layers)}: which layers route is "
                "unknown. Give the model's complete config.json."
            )
        first, *others = stated.values()
        if any(answer != first for answer in others):
            raise PayloadError(f"MRR303: {' and '.join(stated)} of the {config.get('model_type')} config disagree.")
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


def _list(config: Config, name: str) -> list[Any]:
    value = config.get(name)
    if not isinstance(value, (list, tuple)):
        raise PayloadError(f"MRR303: the {config.get('model_type')} config has {name}={value!r}, expected a list.")
    return list(value)


def _listed(config: Config, name: str, num_layers: int) -> list[bool]:
    """Return which layers a list of their indices from 0 names."""
    indices = _list(config, name)
    if not all(type(i) is int and 0 <= i < num_layers for i in indices):
        raise PayloadError(f"MRR303: {name}={indices} of the config do not fit {num_layers} layers.")
    return [i in indices for i in range(num_layers)]


def _kinds(name: str, moe: str, *others: str) -> LayerRule:
    """Return the rule of a list with the kind of each layer."""

    def rule(config: Config, num_layers: int) -> list[bool]:
        kinds = _list(config, name)
        if len(kinds) != num_layers or not all(kind in (moe, *others) for kind in kinds):
            raise PayloadError(
                f"MRR303: {name} must name {num_layers} layers, each one of {[moe, *others]}, got {kinds}."
            )
        return [kind == moe for kind in kinds]

    return rule


def _from(name: str) -> LayerRule:
    """Return the rule of a number of layers in front that do not route."""
    return lambda config, num_layers: [i >= integer(config, name) for i in range(num_layers)]


def _every_layer(config: Config, num_layers: int) -> list[bool]:
    """Source: transformers 5.23, MixtralDecoderLayer, GptOssDecoderLayer, Qwen3_5MoeDecoderLayer: no dense layers."""
    if config.get("mlp_only_layers"):
        raise PayloadError(
            f"MRR303: a {config['model_type']} has routed experts in every layer, its config says mlp_only_layers="
            f"{config['mlp_only_layers']}: the two contradict each other."
        )
    return [True] * num_layers


def _sparse_step(config: Config, num_layers: int) -> list[bool]:
    """Source: transformers 5.23, Qwen3MoeDecoderLayer.__init__."""
    step, dense = integer(config, "decoder_sparse_step", least=1), _listed(config, "mlp_only_layers", num_layers)
    return [not dense[i] and (i + 1) % step == 0 for i in range(num_layers)]


def _first_dense(config: Config, num_layers: int) -> list[bool]:
    """Source: vLLM 0.22, DeepseekV2DecoderLayer.__init__."""
    name, freq = "moe_layer_freq", config.get("moe_layer_freq")
    first = integer(config, "first_k_dense_replace", 0)
    if not isinstance(freq, (list, tuple)):
        # Absent means 1: the field is optional in every reader of these configs, and transformers 5 does not write it.
        step = integer(config, name, 1, least=1)
        freq = [i % step == 0 for i in range(num_layers)]
    if len(freq) != num_layers or not all(routed in (0, 1) for routed in freq):
        raise PayloadError(
            f"MRR303: {name}={config.get(name)!r} must be 1 or more, or one 0 or 1 for each of {num_layers} layers."
        )
    return [i >= first and bool(routed) for i, routed in enumerate(freq)]


def _layer_freq(config: Config, num_layers: int) -> list[bool] | None:
    """A list of layers says it all, and some configs have nothing else; a number says nothing alone."""
    return _first_dense(config, num_layers) if isinstance(config["moe_layer_freq"], (list, tuple)) else None


def _pattern(config: Config, num_layers: int) -> list[bool]:
    """Source: NVIDIA's configuration_nemotron_h.py (M mamba, * attention, - MLP, E experts)."""
    pattern = config["hybrid_override_pattern"]
    if not isinstance(pattern, str) or not set(pattern) <= set("M*-E") or len(pattern) != num_layers:
        raise PayloadError(f"MRR303: hybrid_override_pattern {pattern!r} must be {num_layers} of the letters M * - E.")
    return [kind == "E" for kind in pattern]


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
    # Numbers behind the last layer are those of multi-token prediction.
    return _listed({**config, "moe_layers_enum": layers}, "moe_layers_enum", 1 << 20)[:num_layers]


_ROUTED = ("n_routed_experts", "num_local_experts")
_KIMI_TOPK = ("num_experts_per_token", "num_experts_per_tok")
_MLP_TYPES = _kinds("mlp_layer_types", "sparse", "dense")
_FIRST_DENSE = {"mlp_layer_types": _MLP_TYPES, "first_k_dense_replace": _first_dense, "moe_layer_freq": _layer_freq}
_SPARSE_STEP, _EVERY, _DENSE = {"": _sparse_step}, {"": _every_layer}, {"": _from("num_dense_layers")}
_QWEN = Family(layers=_SPARSE_STEP)
_QWEN_SHARED = Family(layers=_SPARSE_STEP, shared_experts=1)
_ALL_MOE = Family(layers=_EVERY)
_ALL_MOE_SHARED = Family(layers=_EVERY, shared_experts=1)
_DEEPSEEK = Family(layers=_FIRST_DENSE, num_experts=("n_routed_experts",), shared_experts="n_shared_experts")
_BAILING = Family(layers=_FIRST_DENSE, topk=_KIMI_TOPK, shared_experts="num_shared_experts")
_STEP = Family(
    layers={"mlp_layer_types": _MLP_TYPES, "moe_layers_enum": _enumerated},
    num_experts=("moe_num_experts", "n_routed_experts", "num_experts"),
    topk=("moe_top_k", "num_experts_per_tok"),
    shared_experts=1,
)
_MINIMAX_M3 = Family(layers=_FIRST_DENSE, shared_experts="n_shared_experts")

FAMILIES: Mapping[str, Family] = {
    "qwen3_moe": _QWEN,
    "qwen3_vl_moe_text": _QWEN,
    "qwen3_omni_moe_text": _QWEN,
    "qwen2_moe": _QWEN_SHARED,
    "qwen3_next": _QWEN_SHARED,
    "qwen3_5_moe_text": _ALL_MOE_SHARED,
    "mixtral": _ALL_MOE,
    "gpt_oss": _ALL_MOE,
    "olmoe": _ALL_MOE,
    "flex_olmo": _ALL_MOE,
    "phimoe": _ALL_MOE,
    "granitemoe": _ALL_MOE,
    "granitemoeshared": _ALL_MOE_SHARED,
    "granitemoehybrid": _ALL_MOE_SHARED,
    "minimax": _ALL_MOE,
    "minimax_m2": _ALL_MOE,
    "minimax_m3": _MINIMAX_M3,
    "minimax_m3_vl_text": _MINIMAX_M3,
    "hunyuan_v1_moe": Family(layers=_EVERY, topk=("moe_topk", "num_experts_per_tok"), shared_experts=1),
    "longcat_flash": Family(
        layers=_EVERY, num_layers="num_layers", num_experts=_ROUTED, topk=("moe_topk", "num_experts_per_tok")
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "deepseek_v4": Family(
        # The first layers route by a table of token ids: no router chooses there. Engines send zeros, or the table's ids.
        layers={
            "mlp_layer_types": _kinds("mlp_layer_types", "moe", "hash_moe"),
            "num_hash_layers": _from("num_hash_layers"),
            "moe_n_hash_layers": _from("moe_n_hash_layers"),
        },
        num_experts=_ROUTED,
        shared_experts="n_shared_experts",
    ),
    "kimi_k2": _DEEPSEEK,
    "kimi_linear": _BAILING,
    "bailing_moe": _BAILING,
    "bailing_moe_v2": _BAILING,
    "bailing_hybrid": _BAILING,
    "dots1": _DEEPSEEK,
    "mimo_v2_flash": _DEEPSEEK,
    "exaone_moe": _BAILING,
    "glm4_moe": _DEEPSEEK,
    "glm4v_moe_text": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "glm_moe_dsa": _DEEPSEEK,
    "ernie4_5_moe": Family(
        layers={"": _span},
        num_experts=("moe_num_experts", "num_experts"),
        topk=("moe_k", "num_experts_per_tok"),
        shared_experts="moe_num_shared_experts",
    ),
    "step3p5": _STEP,
    "step3p7_text": _STEP,
    "afmoe": Family(layers=_DENSE, shared_experts="num_shared_experts"),
    "lfm2_moe": Family(layers=_DENSE),
    "jamba": Family(layers={"": _periodic}),
    "nemotron_h": Family(
        layers={
            "hybrid_override_pattern": _pattern,
            "layers_block_type": _kinds(
                "layers_block_type", "moe", "mamba", "linear_attention", "attention", "full_attention", "mlp"
            ),
        },
        num_experts=("n_routed_experts",),
        shared_experts="n_shared_experts",
    ),
    "llama4_text": Family(layers={"": _interleaved}, num_experts=("num_local_experts",), shared_experts=1),
}
