"""The functions of each trainer that our hooks need, rebuilt in a few lines, with passes that go through schedules.

Each `run(schedule, forward_only)` is `passes` of `steps.py`. Facts of the trainers' code, none of its text. miles' runs on a
Megatron-Core whose routers ask its manager, as its own Megatron-LM.
"""

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import miles_fork
from tests.trainers.stand_ins import trainer_imports

SLIME = {
    "slime/utils/routing_replay.py": """
import os

def register_routing_replay(router):
    if os.environ.get("ENABLE_ROUTING_REPLAY", "0") == "1":
        raise AssertionError("slime's own replay is on")

def get_routing_replay_compute_topk(old_topk_fn):  # the routing function of slime's Megatron-LM calls it
    return old_topk_fn
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
    stage, enabled = "fallthrough", True

    def register_to_module(self, module, attr_name):
        raise AssertionError("miles' own replay is on")

    def get_topk_fn(self, old_topk_fn, return_probs):
        assert self.stage == "fallthrough", "miles' own replay is on"
        return old_topk_fn

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
    assert "routed_experts" not in data, "as NeMo-RL refuses routes where a multimodal model packs inside"
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

ROLL = {
    "roll/utils/functionals.py": """
from types import SimpleNamespace
from torch import arange, tensor
from torch.nn.utils.rnn import pad_sequence

def postprocess_generate(output, routed_experts=None):
    input_ids = pad_sequence(output, batch_first=True)
    lengths = tensor([[len(part)] for part in output])
    batch = {"input_ids": input_ids, "attention_mask": (arange(input_ids.shape[1]) < lengths).long()}
    if routed_experts is not None:
        rows = [part.new_zeros(input_ids.shape[1], *part.shape[1:]) for part in routed_experts]
        for row, part in zip(rows, routed_experts):
            row[:len(part)] = part
        batch["routed_experts"] = pad_sequence(rows, batch_first=True)
    return SimpleNamespace(batch=batch)
""",
    "roll/distributed/strategy/megatron_strategy.py": """
from functools import partial
from types import SimpleNamespace
from megatron.core.pipeline_parallel import get_forward_backward_func

class MegatronInferStrategy:
    enable_router_replay = True

    def inner_forward_step(self, data, run):
        assert {"input_ids", "attention_mask"} <= set(data.batch)
        assert not (self.enable_router_replay and "routed_experts" in data.batch), "ROLL's own replay is on"
        return run()

    def forward_step(self, batch, run):
        assert not ("routed_experts" in batch.batch and self.enable_router_replay), "ROLL's own replay is on"
        return self.inner_forward_step(batch, partial(run, self.forward_backward_func, forward_only=True))

class MegatronTrainStrategy(MegatronInferStrategy):
    def initialize(self, chunks):
        self.model = SimpleNamespace(get_models=lambda: chunks)
        self.forward_backward_func = get_forward_backward_func()

    def train_step(self, batch, run):
        assert not self.enable_router_replay and "routed_experts" in batch.batch, "ROLL's own replay is on"
        losses = self.inner_forward_step(batch, partial(run, self.forward_backward_func, forward_only=False))
        return {"loss": losses}
""",
}

MS_SWIFT = {
    "swift/megatron/trainers/utils.py": """
def prepare_batch(args, data, vp_stage=None):
    return {name: data[name] for name in data if name not in ("seq_lens", "text_position_ids", "position_ids")}

def compute_per_token_logps_fn(model, args, data_iterator, enable_routing_replay=False):
    data = next(data_iterator)
    routed_experts = data.pop("routed_experts")
    assert set(prepare_batch(args, data)) == {"input_ids"}
    assert not args.is_replay_forward_action, "no router has an action"
    return args.forward_step_helper(), None
""",
    "swift/megatron/trainers/base.py": """
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

class BaseMegatronTrainer:
    def _replace_data_iterator(self, data_iterator):
        return data_iterator

    def train_step(self, train_data_iterator):
        for each in self.wrapped_models:
            each.train()
        data_iterator = self._replace_data_iterator(train_data_iterator)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        self.forward_step(data_iterator)
        metrics = self.args.run(get_forward_backward_func(), forward_only=False)
        RouterReplay.clear_global_router_replay_action()
        return metrics
""",
    "swift/megatron/trainers/rollout_mixin.py": """
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from .utils import compute_per_token_logps_fn

class MegatronRolloutMixin:
    def _replace_data_iterator(self, data_iterator):
        batches = list(data_iterator)
        for each in batches:
            self.compute(each)  # the reference's
        for each in batches:
            RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
            each["routed_experts"] = self.compute(each)[1]
            RouterReplay.clear_global_router_replay_action()
        for each in self.unwrapped_models:
            each.train()
        return iter(batches)

    def compute(self, batch):
        return compute_per_token_logps_fn(self.unwrapped_models[0], self.args, iter([dict(batch)]))
""",
    "swift/megatron/trainers/grpo_trainer.py": """
from .base import BaseMegatronTrainer
from .rollout_mixin import MegatronRolloutMixin

class MegatronGRPOTrainer(MegatronRolloutMixin, BaseMegatronTrainer):
    def forward_step(self, data_iterator):
        assert not self.args.is_replay_forward_action and not self.args.set_router_replay_data
        assert all("routed_experts" not in data for data in data_iterator), "ms-swift's own replay is on"
""",
}

MEGATRON_RL = {
    "megatron/rl/sequence_packing_utils.py": """
from types import SimpleNamespace

def pack_all_trajectories(trajs):
    bins = {"all_gather": SimpleNamespace(bin_seq_indices=[[2, 3], [0, 1], [4], [5]])}
    return SimpleNamespace(packing_info=bins["all_gather"])
""",
    "megatron/rl/rl_utils.py": """
from functools import partial
from types import SimpleNamespace
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.rl.sequence_packing_utils import pack_all_trajectories

def get_args():
    return SimpleNamespace()

def get_inference_interface(args, loop, model):
    return "MegatronLocal"

def prepare_trajectories(rows, tokenizer):
    return [(row.trajectory[-1] + [tokenizer.pad], row.generation_mask) for row in rows]

def compute_logprobs_batch(model, packing_context, forward_backward_func):
    return forward_backward_func()

def prepare_data_for_update(model, rollouts, tokenizer, request_ledger, run):
    rows = [each for group in rollouts for each in group]
    packing_context = pack_all_trajectories(prepare_trajectories(rows, tokenizer))
    for name in ("rl/compute-old-logprobs", "rl/compute-ref-logprobs"):
        schedule = partial(run, get_forward_backward_func(), forward_only=True)
        compute_logprobs_batch(model, packing_context, schedule)
""",
    "megatron/core/inference/engines/dynamic_engine.py": """
from types import SimpleNamespace

class DynamicInferenceEngine:
    def post_process_requests(self, rows_of):
        finished_request_records = [SimpleNamespace(requests=[each]) for each in self.requests]
        for record, rows in zip(finished_request_records, rows_of):
            record.requests[0].routing_indices = rows
        return [], finished_request_records
""",
    "megatron/core/inference/inference_request.py": """
from types import SimpleNamespace

class FinishedRequestRecord(SimpleNamespace):
    @classmethod
    def from_request(cls, request):
        return cls(policy_epoch=request.policy_epoch)
""",
    "megatron/training/training.py": """
def train_step(model, forward_backward_func):
    losses_reduced = forward_backward_func(forward_only=False)
    return {"lm loss": losses_reduced}, 0
""",
}

SOURCES = {
    "slime": SLIME,
    "miles": MILES,
    "nemo_rl": NEMO_RL,
    "skyrl": SKYRL,
    "roll": ROLL,
    "ms_swift": MS_SWIFT,
    "megatron_rl": MEGATRON_RL,
    "verl": VERL,
}


def write(folder: Path, files: dict[str, str]) -> str:
    """Write a trainer's files, and return the folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in [each for each in folder.rglob("*") if each.is_dir()]:
        (path / "__init__.py").touch()
    return str(folder)


@contextmanager
def imports(folder: Path, files: dict[str, str]) -> Iterator[None]:
    """Let a trainer of these files be imported inside the block."""
    packages = sorted({name.partition("/")[0] for name in files})
    write(folder, files)
    if packages != ["megatron"]:
        with trainer_imports(str(folder), packages), pytest.MonkeyPatch.context() as patch:
            if packages == ["miles"]:
                miles_fork.install(patch, "miles-main")  # its routers ask miles' manager
            yield
        return
    # Among the modules of Megatron-Core, which stay.
    modules = {name.removesuffix(".py").replace("/", "."): folder / name for name in files}
    before = {name: sys.modules.get(name) for name in modules}
    try:
        for name, path in modules.items():
            spec = importlib.util.spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module
