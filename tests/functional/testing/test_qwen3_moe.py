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


def test_a_config_that_transformers_5_saved(checkpoints_dir, tmp_path):
    config = json.loads((checkpoints_dir / "qwen3moe" / "config.json").read_text())
    config["num_local_experts"] = config.pop("num_experts")
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = qwen3_moe_config(tmp_path, ParallelSizes())
    assert (loaded.num_moe_experts, loaded.moe_router_topk, loaded.moe_layer_freq) == (8, 2, [1, 0, 1, 1])


def test_another_model_raises(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mixtral", "tie_word_embeddings": true}')
    with pytest.raises(RouterReplayError, match=r"model_type='mixtral', tie_word_embeddings=True"):
        qwen3_moe_config(tmp_path, ParallelSizes())
