"""The multimodal models of mbridge and Megatron-Bridge, unedited, from folders that variables name.

Only the modules that a model is made of are imported: their packages load trainers, converters and hubs. Attention is
`PackedAttention`, on a CPU, where theirs would be Transformer Engine's; weights are drawn.
"""

from __future__ import annotations

import importlib
import os
import sys
from copy import deepcopy
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from megatron_router_replay.layout.split import split_context_parallel
from megatron_router_replay.testing import ParallelSizes
from megatron_router_replay.testing.packed_attention import PackedAttention
from tests.support.tiny_gpt import random_parameter, tiny_gpt_config

IMAGE, VIDEO, VISION_START = 301, 302, 303
VOCAB = 320
DIRS = {
    "mbridge": "MBRIDGE_DIR",
    "Megatron-Bridge": "MEGATRON_BRIDGE_DIR",
    "Qwen3.5": "MEGATRON_BRIDGE_DIR",
}
"""Variables with the folder of a checkout."""


def import_only(root: str, name: str) -> Any:
    """Import a module of a folder without running the packages that it is in."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        package, folder = ".".join(parts[:count]), str(Path(root, *parts[:count]))
        if package not in sys.modules:
            module = ModuleType(package)
            module.__path__ = [folder]
            sys.modules[package] = module
        elif folder not in sys.modules[package].__path__:
            sys.modules[package].__path__ = [*sys.modules[package].__path__, folder]
    return importlib.import_module(name)


def as_config(kind: Any, base: Any, **options: Any) -> Any:
    """Return a config of a subclass of TransformerConfig with the values of another one."""
    known = {each.name for each in fields(kind) if each.init}
    return kind(**{each.name: getattr(base, each.name) for each in fields(base) if each.name in known} | options)


def layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = PackedAttention
    return spec


def vision_spec() -> Any:
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec

    spec = get_vit_layer_with_local_spec()
    spec.submodules.self_attention.submodules.core_attention = ImageAttention
    return spec


class ImageAttention(PackedAttention):
    """Of a vision model, whose context-parallel ranks have whole images each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cp_group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)


VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 2,
    "temporal_patch_size": 1,
    "in_channels": 3,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
}


def draw_parameters(chunks: list[Any]) -> None:
    """Values by name, the same on every rank that has the parameter."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.data = random_parameter(name.split("layers.")[-1], parameter.shape, seed=5)


def build_mbridge(root: str, layout: ParallelSizes, **options: Any) -> list[Any]:
    """Qwen3VLModel, which packs its rows by attention_mask."""
    from megatron.core import parallel_state
    from megatron.core.extensions import transformer_engine as extensions
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    model = import_only(root, "mbridge.models.qwen3_vl.model")
    configs = import_only(root, "mbridge.models.qwen3_vl.transformer_config")
    vision = import_only(root, "mbridge.models.qwen3_vl.utils")
    # Megatron-Core's development branch has it.
    extensions.get_thd_partitioned_indices = thd_partitioned_indices  # type: ignore[attr-defined]
    base = tiny_gpt_config(layout, variable_seq_lengths=True, **options)
    config = as_config(configs.Qwen3VLTransformerConfig, base, mrope_section=[4, 2, 2], spatial_merge_size=2)
    vision_config = configs.get_vision_model_config(deepcopy(config), SimpleNamespace(**VISION))
    vision_config.pipeline_model_parallel_size = 1
    vision_config.sequence_parallel = False
    merger = vision.PatchMergerSubmodules(
        patch_norm=TorchNorm, linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
    )
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunk = model.Qwen3VLModel(
        language_transformer_config=config,
        language_transformer_layer_spec=layer_spec(config),
        language_vocab_size=VOCAB,
        language_max_sequence_length=512,
        vision_transformer_config=vision_config,
        vision_transformer_layer_spec=vision_spec(),
        vision_patch_merger_spec=merger,
        pre_process=rank == 0,
        post_process=rank == layout.pp_size - 1,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
    )
    return [chunk]


def thd_partitioned_indices(cu_seqlens: Any, total: int, cp_size: int, cp_rank: int) -> Any:
    """Stands for Transformer Engine's kernel, which a model calls to split packed sequences over context-parallel ranks."""
    whole = torch.arange(total).unsqueeze(0)
    return split_context_parallel(whole, cp_rank=cp_rank, cp_size=cp_size, cu_seqlens_padded=cu_seqlens.flatten())[0]


class TorchNorm(torch.nn.LayerNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)


def build_megatron_bridge(root: str, layout: ParallelSizes, *, qwen3_5: bool = False, **options: Any) -> list[Any]:
    """Qwen3VLModel, which is Qwen3.5's class, too: that has gated delta-net layers and multi-token prediction."""
    if qwen3_5:
        options["mtp_num_layers"] = 1
    base = tiny_gpt_config(layout, variable_seq_lengths=True, calculate_per_token_loss=layout.cp_size > 1, **options)
    return megatron_bridge_model(root, layout, base, qwen3_5=qwen3_5)


def import_megatron_bridge(root: str) -> Any:
    """Return the module of Megatron-Bridge's Qwen3VLModel, whose layers are Megatron-Core's own."""
    import typing

    import megatron.core.utils
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    megatron.core.utils.tex = SimpleNamespace(thd_get_partitioned_indices=thd_partitioned_indices)
    typing.override = getattr(typing, "override", lambda method: method)  # type: ignore[attr-defined]  # of Python 3.12
    root = str(Path(root, "src"))
    model = import_only(root, "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.model")
    model.get_vit_layer_with_transformer_engine_spec = vision_spec
    attention = import_only(root, "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention")
    attention.TEDotProductAttention = torch.nn.Identity  # no class without that package
    model.TENorm, model.TEColumnParallelLinear, model.TERowParallelLinear = (
        TorchNorm,
        ColumnParallelLinear,
        RowParallelLinear,
    )
    return model


def megatron_bridge_model(
    root: str, layout: ParallelSizes, base: Any, *, qwen3_5: bool = False, **tokens: int
) -> list[Any]:
    """Build Megatron-Bridge's model.

    Args:
        base: TransformerConfig of the language model.
        tokens: image_token_id and its like; none: those of this file.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    model = import_megatron_bridge(root)
    root = str(Path(root, "src"))
    configs = import_only(root, "megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_config")
    config = as_config(
        configs.Qwen3VLTransformerConfig,
        base,
        vocab_size=VOCAB,
        mrope_section=[4, 2, 2],
        spatial_merge_size=2,
        **{"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": VISION_START, **tokens},
    )
    for name in ("enable_cuda_graph", "external_cuda_graph"):
        setattr(config, name, getattr(config, name, False))
    spec = layer_spec(config)
    # As its provider does; Megatron-Core's own would split positions over context-parallel ranks a second time.
    for layer in spec.layer_specs:
        layer.submodules.self_attention.module = model.Qwen3VLSelfAttention
    mtp_spec = None
    if qwen3_5:
        mtp_spec = get_gpt_mtp_block_spec(config, deepcopy(spec), use_transformer_engine=False)
        spec = deepcopy(spec)
        for layer in spec.layer_specs[::2]:
            layer.submodules.self_attention.module = DeltaNet
    rank = parallel_state.get_pipeline_model_parallel_rank()
    chunk = model.Qwen3VLModel(
        language_transformer_config=config,
        language_transformer_layer_spec=spec,
        vision_transformer_config=SimpleNamespace(**VISION | ({"deepstack_visual_indexes": []} if qwen3_5 else {})),
        pre_process=rank == 0,
        post_process=rank == layout.pp_size - 1,
        mtp_block_spec=mtp_spec,
    )
    return [chunk]


class DeltaNet(torch.nn.Module):
    """Stands for the mixer of a gated delta-net layer, which needs a GPU; it mixes channels alone."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states * self.weight).tanh(), None


BUILDERS = {
    "mbridge": build_mbridge,
    "Megatron-Bridge": build_megatron_bridge,
    "Qwen3.5": partial(build_megatron_bridge, qwen3_5=True),
}


def folder(kind: str) -> str:
    return os.environ.get(DIRS[kind], "")


def build(kind: str, layout: ParallelSizes, **options: Any) -> list[Any]:
    from megatron.core.enums import ModelType

    layout.initialize()
    chunks = BUILDERS[kind](folder(kind), layout, **options)
    for chunk in chunks:
        chunk.model_type = ModelType.encoder_or_decoder  # as Megatron-Core's get_model sets it
    draw_parameters(chunks)
    return chunks


def pixels(images: list[int]) -> dict[str, Any]:
    """Images of four patches, which are merged into one embedding each; a number says which one it is."""
    size = VISION["in_channels"] * VISION["temporal_patch_size"] * VISION["patch_size"] ** 2
    return {
        "pixel_values": torch.cat([(torch.arange(4 * size) * (1.0 + number)).sin().view(4, size) for number in images]),
        "image_grid_thw": torch.tensor([[1, 2, 2]] * len(images)),
    }
