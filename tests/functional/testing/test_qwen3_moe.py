import json

import pytest
import torch

from megatron_router_replay.errors import RouterReplayError
from megatron_router_replay.testing import ParallelSizes, load_qwen3_moe
from megatron_router_replay.testing.packed_attention import PackedAttention
from megatron_router_replay.testing.qwen3_moe import qwen3_moe_config
from tests.support.schedule import run_schedule


def tokens():
    return torch.randint(320, (2, 24), generator=torch.Generator().manual_seed(0))


def keep_output(output):
    return output.sum(), output


def forward_step(data_iterator, model):
    microbatch = next(data_iterator)
    logits = model(microbatch["tokens"], microbatch["position_ids"], None, runtime_gather_output=True)
    return logits, keep_output


def logits_of(checkpoint, layout, core_attention):
    layout.initialize()
    chunks = load_qwen3_moe(checkpoint, layout, core_attention=core_attention)
    microbatch = {"tokens": tokens(), "position_ids": torch.arange(24).expand(2, -1).contiguous()}
    microbatches = [microbatch] * layout.pp_size
    return run_schedule(chunks, layout, microbatches, forward_only=True, forward_step=forward_step)


@pytest.fixture(scope="module", params=["qwen3moe", "qwen3moe_sparse"])
def checkpoint_and_logits(request, checkpoints_dir):
    transformers = pytest.importorskip("transformers")
    checkpoint = checkpoints_dir / request.param
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        return checkpoint, model(tokens()).logits


@pytest.mark.parametrize(
    ("layout", "core_attention"),
    [
        (ParallelSizes(), None),
        (ParallelSizes(), PackedAttention),
        (ParallelSizes(tp_size=2, ep_size=2), None),
        (ParallelSizes(tp_size=2, pp_size=2, ep_size=2, vp_size=2), None),
    ],
    ids=str,
)
def test_logits_equal_those_of_transformers(on_ranks, checkpoint_and_logits, layout, core_attention):
    checkpoint, expected = checkpoint_and_logits
    if checkpoint.name == "qwen3moe_sparse" and layout.pp_size > 1:
        pytest.skip("three layers do not split into equal stages")
    ranks = on_ranks(layout.world_size, logits_of, checkpoint, layout, core_attention)
    results = [logits for outputs in ranks for logits in outputs]
    assert results
    for logits in results:
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("head_dim", [{}, {"head_dim": 32}], ids=["not set", "32"])
def test_a_folder_that_this_transformers_saves(head_dim, on_ranks, tmp_path):
    """Since transformers 5, its config has num_local_experts, and no head_dim that was not set."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2} | head_dim
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    config = transformers.Qwen3MoeConfig(vocab_size=320, num_hidden_layers=3, mlp_only_layers=[1], **sizes, **experts)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    if int(transformers.__version__.split(".")[0]) >= 5:
        assert "num_local_experts" in json.loads((tmp_path / "config.json").read_text())
    with torch.no_grad():
        expected = model(tokens()).logits
    ((logits,),) = on_ranks(1, logits_of, tmp_path, ParallelSizes(), None)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_another_model_raises(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "tie_word_embeddings": true}')
    with pytest.raises(RouterReplayError, match=r"model_type='mixtral', tie_word_embeddings=True"):
        qwen3_moe_config(tmp_path, ParallelSizes())
