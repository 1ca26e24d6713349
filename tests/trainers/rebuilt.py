"""The functions of each trainer that our hooks need, rebuilt in a few lines, with passes that go through schedules.

Each `run(schedule, forward_only)` is `passes` of `test_rebuilt.py`. Facts of the trainers' code, none of its text.
"""

SLIME = {
    "slime/utils/routing_replay.py": """
import os

def register_routing_replay(router):
    if os.environ.get("ENABLE_ROUTING_REPLAY", "0") == "1":
        raise AssertionError("slime's own replay is on")
""",
    "slime/backends/megatron_utils/model.py": """
from megatron.core.pipeline_parallel import get_forward_backward_func

def forward_only(run):
    return run(get_forward_backward_func(), forward_only=True)

def train_one_step(run):
    loss_reduced = {"loss": run(get_forward_backward_func(), forward_only=False)}
    return loss_reduced, 0.0
""",
    "slime/backends/megatron_utils/actor.py": """
import os
from .model import forward_only, train_one_step

class MegatronTrainRayActor:
    def fill_routing_replay(self, data_iterator, num_microbatches, rollout_data):
        raise AssertionError("slime's own queues of rollout_routed_experts")

    def train_actor(self, rollout_data, run):
        self.fill_routing_replay([], [], rollout_data)
        for stage in ("fallthrough", "replay_forward"):
            os.environ["ROUTING_REPLAY_STAGE"] = stage
            forward_only(run)
        os.environ["ROUTING_REPLAY_STAGE"] = "replay_backward"
        return train_one_step(run)[0]
""",
}

MILES = {
    "miles/utils/replay_base.py": """
class BaseReplayManager:
    stage = "fallthrough"

    def register_to_module(self, module, attr_name):
        raise AssertionError("miles' own replay is on")

    def get_topk_fn(self, old_topk_fn, return_probs):
        raise AssertionError("miles' own replay is on")

routing_replay_manager, indexer_replay_manager = BaseReplayManager(), BaseReplayManager()
""",
    "miles/backends/training_utils/replay_data.py": """
def fill_replay_data(*, models, rollout_data, data_key):
    if data_key == "rollout_routed_experts":
        raise AssertionError("miles' own queues")
""",
    "miles/backends/megatron_utils/model.py": """
from megatron.core.pipeline_parallel import get_forward_backward_func

def forward_only(run):
    return run(get_forward_backward_func(), forward_only=True)

def train_one_step(run):
    loss_reduced = {"loss": run(get_forward_backward_func(), forward_only=False)}
    return loss_reduced, 0.0, "normal"
""",
    "miles/backends/megatron_utils/actor.py": """
from miles.utils.replay_base import routing_replay_manager
from ..training_utils.replay_data import fill_replay_data
from .model import forward_only, train_one_step

class MegatronTrainRayActor:
    def train_actor(self, rollout_data, run):
        for data_key in ("rollout_routed_experts", "rollout_indexer_topk"):
            fill_replay_data(models=self.model, rollout_data=rollout_data, data_key=data_key)
        routing_replay_manager.register_to_module(None, "routing_replay")
        assert routing_replay_manager.get_topk_fn(max, return_probs=True) is max
        for stage in ("fallthrough", "replay_forward"):
            routing_replay_manager.stage = stage
            forward_only(run)
        routing_replay_manager.stage = "replay_backward"
        return train_one_step(run)[0]
""",
}

NEMO_RL = {
    "nemo_rl/algorithms/grpo.py": """
def add_grpo_token_loss_masks_and_generation_logprobs(message_logs):
    for log in message_logs:
        for message in log:
            message["token_loss_mask"] = message["token_ids"] * 0
""",
    "nemo_rl/models/megatron/data.py": """
def get_microbatch_iterator(data, cfg):
    return iter(())
""",
    "nemo_rl/models/megatron/train.py": """
from megatron.core.pipeline_parallel import get_forward_backward_func

def megatron_forward_backward(model, run, forward_only=False, use_router_replay=False):
    assert not use_router_replay, "NeMo-RL's own replay is on"
    return [{"loss": each} for each in run(get_forward_backward_func(), forward_only=forward_only)]

def aggregate_training_statistics(all_mb_metrics, losses, data_parallel_group):
    return {"loss": [metrics["loss"] for metrics in all_mb_metrics]}, sum(losses)
""",
    "nemo_rl/models/policy/workers/megatron_policy_worker.py": """
from nemo_rl.models.megatron.data import get_microbatch_iterator
from nemo_rl.models.megatron.train import aggregate_training_statistics, megatron_forward_backward

def log_probs(model, data, run):
    for use_router_replay in (False, True):
        get_microbatch_iterator(data, {})
        megatron_forward_backward(model, run, forward_only=True, use_router_replay=use_router_replay)

def train(model, data, run, num_chunks=1):
    all_mb_metrics = []
    for _ in range(num_chunks):
        get_microbatch_iterator(data, {})
        all_mb_metrics += megatron_forward_backward(model, run, use_router_replay=True)
    all_mb_metrics = [{name: value / 52 for name, value in metrics.items()} for metrics in all_mb_metrics]
    return aggregate_training_statistics(all_mb_metrics, losses=[], data_parallel_group=None)[0]
""",
}

SKYRL = {
    "skyrl/train/trainer.py": """
class RayPPOTrainer:
    def convert_to_training_input(self, generator_output, uids):
        assert len(generator_output["loss_masks"]) == len(generator_output["response_ids"])
        return [
            (prompt + response, rows)
            for prompt, response, rows in zip(
                generator_output["prompt_token_ids"],
                generator_output["response_ids"],
                generator_output["rollout_expert_indices"],
            )
        ]
""",
    "skyrl/backends/skyrl_train/distributed/megatron/megatron_utils.py": """
def preprocess_packed_seqs(input_ids, attention_mask, pre_process=True):
    return "laid out" if pre_process else input_ids

def remove_left_padding(input_ids, attention_mask, pre_process=True):
    return "laid out" if pre_process else input_ids
""",
    "skyrl/backends/skyrl_train/workers/megatron/megatron_model_wrapper.py": """
from megatron.core.pipeline_parallel import get_forward_backward_func
from skyrl.backends.skyrl_train.distributed.megatron.megatron_utils import preprocess_packed_seqs

class MegatronModelWrapper:
    def __init__(self, actor_module):
        self.actor_module = actor_module

    def forward(self, micro_batches, run, replays):
        assert all(batch["rollout_expert_indices"] is None for batch in micro_batches)
        first = micro_batches[0]
        laid_out = preprocess_packed_seqs(first["sequences"], first["attention_mask"], pre_process=False)
        assert (laid_out == "laid out") is replays
        return run(get_forward_backward_func(), forward_only=True)

    def forward_backward_mini_batch(self, micro_batches, run):
        assert all(batch["rollout_expert_indices"] is None for batch in micro_batches)
        assert {"sequences", "attention_mask", "loss_mask"} <= set(micro_batches[0])
        return [{"loss": each} for each in run(get_forward_backward_func(), forward_only=False)]
""",
}

VERL = {
    "verl/workers/engine/megatron/transformer_impl.py": """
class MegatronEngine:
    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        pass

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        enable_routing_replay = data["enable_routing_replay"]
        get_forward_backward_func(model=self.module)
""",
    "verl/models/mcore/util.py": """
def preprocess_thd_engine(input_ids, pre_process=True):
    pass

def preprocess_bshd_engine(input_ids, pre_process=True):
    pass
""",
    "verl/experimental/agent_loop/agent_loop.py": """
class AgentLoopWorker:
    async def _run_agent_loop(self, sampling_params):
        return await self._agent_loop_postprocess(None)
""",
}
"""For the names alone: verl's own code runs in `tests/functional/verl`."""

MEGATRON_RL = {
    "megatron/rl/rl_utils.py": """
def get_inference_interface(args, loop, model):
    return MegatronLocal.launch(model[0])

def prepare_trajectories(rows, tokenizer):
    return [row.trajectory[-1] + [tokenizer.pad] for row in rows], [row.generation_mask for row in rows]

def compute_logprobs_batch(model, packing_context, forward_backward_func):
    return forward_backward_func(model=model)

def prepare_data_for_update(model, rollouts, tokenizer, request_ledger):
    prepare_trajectories(rollouts, tokenizer)
    packing_context = pack_all_trajectories(rollouts)
    for name in ("rl/compute-old-logprobs", "rl/compute-ref-logprobs"):
        compute_logprobs_batch(model, packing_context, None)
""",
    "megatron/rl/sequence_packing_utils.py": """
def pack_all_trajectories(trajs):
    all_gather(trajs)
    return packing_info.bin_seq_indices
""",
    "megatron/core/inference/engines/dynamic_engine.py": """
class DynamicInferenceEngine:
    def post_process_requests(self, request_ids):
        finished_request_records = [self.requests.pop(each) for each in request_ids]
        for record in finished_request_records:
            record.requests[-1].routing_indices = self.rows
        return [], finished_request_records
""",
    "megatron/core/inference/inference_request.py": """
class FinishedRequestRecord:
    def from_request(cls, request):
        return cls(policy_epoch=request.policy_epoch)
""",
    "megatron/training/training.py": """
def train_step(model, forward_backward_func):
    losses_reduced = forward_backward_func(model=model)
    return losses_reduced
""",
}
"""For the names alone: Megatron-LM's own code runs in `test_megatron_rl.py`."""

SOURCES = {"slime": SLIME, "miles": MILES, "nemo_rl": NEMO_RL, "skyrl": SKYRL, "verl": VERL, "megatron_rl": MEGATRON_RL}
