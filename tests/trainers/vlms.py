"""Multimodal models of trainers, unedited, in the sizes of the tiny model: their own class, its vision tower, one image.

Every token of a rollout has an id of its own, which determines its route. So one image of one embedding is enough: the third
token of each rank's first sample stands for it, behind the token that begins an image.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import torch

from tests.functional.mcore import real_vlms
from tests.functional.mcore.real_vlms import VISION
from tests.functional.mcore.small_vlm import arrange
from tests.trainers import ms_swift, oracle
from tests.trainers.stand_ins import Config, remove_stand_ins


def special_tokens() -> dict[str, int]:
    """Return the tokens of this rank's rollout that stand for images, by the names of a Hugging Face config."""
    from megatron.core import parallel_state

    _, start, image, *_ = oracle.rollout(parallel_state.get_data_parallel_rank())[0][0].tolist()
    return {"vision_start_token_id": start, "image_token_id": image, "video_token_id": oracle.VOCAB}


def images() -> list[dict[str, Any] | None]:
    """Return what a processor makes of the images of each sample."""
    return [real_vlms.pixels([1]), *[None] * (oracle.NUM_SAMPLES - 1)]


def import_megatron_bridge() -> Any:
    """Return the module of Megatron-Bridge's Qwen3-VL, which a trainer may have imported as a stand-in."""
    remove_stand_ins("megatron.bridge")
    return real_vlms.import_megatron_bridge(os.environ[real_vlms.DIRS["Megatron-Bridge"]])


def of_megatron_bridge(config: Any, layout: Any) -> list[Any]:
    """Qwen3-VL of Megatron-Bridge, which packs its rows by attention_mask if it gets both."""
    import_megatron_bridge()
    root = os.environ[real_vlms.DIRS["Megatron-Bridge"]]
    config.calculate_per_token_loss = layout.cp_size > 1
    (chunk,) = real_vlms.megatron_bridge_model(root, layout, config, **special_tokens())
    chunk.tokens_of_layers = _packed_inside
    return [chunk]


def of_mcore_bridge(config: Any, layout: Any) -> list[Any]:
    """mcore_bridge's MultimodalGPTModel, which gets whole rows on each context-parallel rank, and its GPTModel.

    Its configuration, RoPE's constants of Hugging Face and the vision tower are replaced.
    """
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings import rope_utils

    folder = ms_swift.bridge()
    assert folder is not None, "the test is skipped"
    remove_stand_ins("mcore_bridge")
    parts: dict[str, dict[str, Any]] = {
        "config": {"ModelConfig": object},
        "utils": {"split_cp_inputs": ms_swift.split_cp_inputs(), "get_logger": lambda: None},
        "model.rope": {"get_rope_inv_freq": _inverse_frequencies, "dynamic_rope_update": None},
    }
    for name, values in parts.items():
        module = sys.modules[f"mcore_bridge.{name}"] = ModuleType(f"mcore_bridge.{name}")
        vars(module).update(values)
    model = real_vlms.import_only(str(folder.parent), "mcore_bridge.model.mm_gpt_model")
    ms_swift.own_function(
        "patcher.py", "_patch_mrope", rope_utils=rope_utils, MultimodalRotaryEmbedding=type("", (), {})
    )()
    image = special_tokens()["image_token_id"]
    fields = {
        "padded_vocab_size": oracle.VOCAB,
        "max_position_embeddings": 512,
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
        "rotary_base": 10000,
        "rope_scaling": None,
        "task_type": "causal_lm",
        "is_multimodal": True,
        "model_meta": Config(visual_cls=lambda config: _Visual(config.hidden_size, image)),
    }
    vars(config).update(fields)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    spec = real_vlms.layer_spec(config)
    chunk = model.MultimodalGPTModel(config, spec, pre_process=rank == 0, post_process=rank == layout.pp_size - 1)
    chunk.tokens_of_layers = lambda tokens, mask, packed: arrange(tokens, None, packed)
    return [chunk]


def _inverse_frequencies(config: Any) -> Any:
    size = config.kv_channels
    return config.rotary_base ** (torch.arange(0, size, 2) / -size), 1.0


class _Visual(torch.nn.Module):
    """Stands for a vision tower: each image has the same embedding."""

    def __init__(self, hidden_size: int, image: int) -> None:
        super().__init__()
        self.image, self.embedding = image, torch.nn.Parameter(torch.ones(hidden_size))

    def get_inputs_embeds(self, embedded: torch.Tensor, *, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.where((input_ids == self.image).unsqueeze(-1), self.embedding, embedded)


def of_roll(config: Any, layout: Any) -> list[Any]:
    """Qwen3-VL of ROLL's mcore_adapter: a GPTModel that packs its own rows; its vision tower is transformers'."""
    from mcore_adapter.models import model_factory
    from mcore_adapter.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    model_factory.get_gpt_decoder_block_spec = lambda config, **_: real_vlms.layer_spec(config)
    fields = {
        "padded_vocab_size": oracle.VOCAB,
        "max_sequence_length": 512,
        "tie_embeddings_and_output_weights": False,
        "position_embedding_type": "mrope",
        "mrope_section": [4, 2, 2],
        "rotary_percent": 1.0,
        "rotary_base": 10000,
        "rotary_scaling": False,
        "rotary_scaling_factor": 8.0,
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "init_model_with_meta_device": False,
        "vision_config": VISION,
        "merge_size": VISION["spatial_merge_size"],
        "pixel_values_dim": VISION["in_channels"] * VISION["temporal_patch_size"] * VISION["patch_size"] ** 2,
        **special_tokens(),
    }
    vars(config).update(fields)
    chunk = Qwen3VLModel(config, vp_stage=0)
    chunk.tokens_of_layers = _packed_inside
    return [chunk]


def _packed_inside(tokens: Any, mask: Any, packed: Any) -> Any:
    """Return the tokens of the layers of a model that packs them by a mask."""
    return tokens if mask is None or packed is None else arrange(tokens, mask, packed)


def of_slime(config: Any, layout: Any) -> list[Any]:
    """Qwen3.5-VL of slime_plugins, with attention in all layers."""
    from megatron.core import parallel_state
    from slime_plugins.models.qwen3_5_vl import Qwen3_5VLModel
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig

    hf_config = Config(
        model_type="qwen3_5_moe",
        vision_config=Qwen3_5MoeVisionConfig(**VISION, attn_implementation="eager"),
        text_config=Config(rope_parameters={"mrope_section": [4, 2, 2]}),
        **special_tokens(),
    )
    args = Config(
        padded_vocab_size=oracle.VOCAB,
        max_position_embeddings=512,
        rotary_percent=1.0,
        rotary_base=10000,
        untie_embeddings_and_output_weights=True,
    )
    rank = parallel_state.get_pipeline_model_parallel_rank()
    config.use_cpu_initialization = True
    chunk = Qwen3_5VLModel(
        config,
        real_vlms.layer_spec(config),
        hf_config,
        args,
        pre_process=rank == 0,
        post_process=rank == layout.pp_size - 1,
        vp_stage=None,
    )
    return [chunk]
