"""Multimodal models of trainers, unedited, in the sizes of the tiny model: their own class, its vision tower, one image.

Every token of a rollout has an id of its own, which determines its route. So one image of one embedding is enough: the third
token of each rank's first sample stands for it, behind the token that begins an image.
"""

from __future__ import annotations

import os
from typing import Any

from tests.functional.mcore import real_vlms
from tests.functional.mcore.real_vlms import VISION
from tests.functional.mcore.small_vlm import arrange
from tests.trainers import oracle
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
