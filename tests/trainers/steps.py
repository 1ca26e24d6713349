"""Run a rebuilt trainer from its rollout to its optimizer."""

import importlib
from functools import partial
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import schedules

from megatron_router_replay.trainers import megatron_rl, miles, ms_swift, nemo_rl, replayer, roll, skyrl, slime
from megatron_router_replay.trainers.request_routes import RequestRoutes
from tests.trainers import oracle
from tests.trainers.stand_ins import Config

SOURCES = ["slime", "miles", "nemo_rl", "skyrl", "roll", "ms_swift", "megatron_rl"]
ARGS = Config(use_rollout_routing_replay=True)


def samples():
    return oracle.rollout(0)


def passes(chunks, seen, ids, schedule, *, forward_only, packs=False, parts=((2, 3), (0, 1), (4,), (5,))):
    """Run a pass: micro-batches of two samples or one, padded on the right or packed."""
    batches = [[ids[i] for i in part] for part in parts]

    def forward_step(iterator, model):
        parts, params = next(iterator), None
        tokens = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        at = torch.arange(tokens.shape[1]).expand_as(tokens)
        if packs:
            tokens, at = torch.cat(parts)[None], torch.cat([torch.arange(len(part)) for part in parts])[None]
            ends = torch.tensor([0, *map(len, parts)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            longest = max(map(len, parts))
            params = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
            )
        result = model(input_ids=tokens, position_ids=at, attention_mask=None, labels=tokens, packed_seq_params=params)
        return result, lambda out: (out.sum(), 0.0)

    for chunk in chunks:
        chunk.train(not forward_only)
    with torch.set_grad_enabled(not forward_only):
        result = schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(parts),
            seq_length=16,
            micro_batch_size=2,
            forward_only=forward_only,
        )
    seen.mark()
    return result


def in_order(name, counts):
    """Return the counts of the reference's pass, the log-probs' and training; Megatron-RL's reference comes second."""
    return [counts[1], counts[0], *counts[2:]] if name == "megatron_rl" else counts


def enter_and_run(name, chunks, run, ids, routes, *, move=list, held=None, more=None):
    """Run the trainer from the rollout to its optimizer; return its metrics.

    Args:
        move: what happens to each sample's rows on their way from driver to worker, where routes travel apart from tokens.
        held: a list that gets the tensors of routes that the trainer's worker holds.
        more: keywords that hooked functions get beside their own.
    """
    held, more = [] if held is None else held, more or {}
    if name in ("slime", "miles"):
        {"slime": slime, "miles": miles}[name].init(ARGS)
        module = __import__(f"{name}.backends.megatron_utils.actor", fromlist=["actor"])
        me = object.__new__(module.MegatronTrainRayActor)
        me.model = chunks
        data = {"tokens": ids, "rollout_routed_experts": routes}
        held += routes
        metrics = me.train_actor(data, run)
        assert set(data) == {"tokens"}, "as the trainer's own function leaves it"
        return metrics
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    if name == "nemo_rl":
        nemo_rl.install()
        from nemo_rl.algorithms.grpo import add_grpo_token_loss_masks_and_generation_logprobs
        from nemo_rl.models.policy.workers import megatron_policy_worker as worker

        # A prompt and an answer each, whose last token has the experts 0, 1, ..., topk - 1.
        last = torch.arange(oracle.TOPK)
        rows = [torch.cat([part, last.expand(1, part.shape[1], -1).to(part.dtype)]).to(torch.int8) for part in routes]
        logs = [
            [{"token_ids": each[at], "routed_experts": part[at]} for at in (slice(1), slice(1, None))]
            for each, part in zip(ids, rows)
        ]
        for _ in range(2):  # the second call changes nothing
            add_grpo_token_loss_masks_and_generation_logprobs(logs, **more)
        values = pad(move([torch.cat([message["routed_experts"] for message in log]) for log in logs]))
        held.append(values)
        lengths = torch.tensor(list(map(len, ids)))
        data = {"input_ids": pad(ids), "routed_experts": values, "input_lengths": lengths}
        worker.log_probs(chunks[0], data, run)
        return {name: sum(values) for name, values in worker.train(chunks[0], data, run).items()}  # as the driver does
    if name in NEWER:
        return NEWER[name](chunks, run, ids, routes, held, more)
    skyrl.install()
    from skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper import MegatronModelWrapper
    from skyrl.train.trainer import RayPPOTrainer

    reply = {
        "prompt_token_ids": [part[:1].tolist() for part in ids],
        "response_ids": [part[1:].tolist() for part in ids],
        "loss_masks": [[1] * (len(part) - 1) for part in ids],
        "rollout_expert_indices": [part.numpy().astype(np.uint8) for part in routes],
    }
    batches, width = [], max(map(len, ids)) + 2
    tokens, values = zip(*RayPPOTrainer().convert_to_training_input(reply, [], **more))
    for own, rows in zip(tokens, move([torch.as_tensor(each) for each in values])):
        padded = torch.arange(oracle.TOPK).expand(width, rows.shape[1], -1).clone()  # SkyRL's filler
        padded[width - len(own) : width - len(own) + len(rows)] = rows
        mask = torch.arange(width) >= width - len(own)
        sequence = torch.zeros(width, dtype=torch.int64).masked_scatter(mask, torch.tensor(own))
        batches.append(
            {"sequences": sequence[None], "attention_mask": mask[None], "rollout_expert_indices": padded[None]}
        )
        held.append(padded)
    model = MegatronModelWrapper(chunks)
    model.forward([{**each, "rollout_expert_indices": None} for each in batches], run, replays=False, **more)
    model.forward(batches, run, replays=True, **more)
    return model.forward_backward_mini_batch(
        [{**each, "loss_mask": torch.ones(1, 1)} for each in batches], run, **more
    )[0]


def _roll(chunks, run, ids, routes, held, more):
    roll.install()
    from roll.distributed.strategy.megatron_strategy import MegatronTrainStrategy
    from roll.utils.functionals import postprocess_generate

    me = MegatronTrainStrategy()
    me.initialize(chunks, **more)
    me.forward_step(postprocess_generate(ids, **more), run, **more)  # the reference's
    batch = postprocess_generate(ids, routed_experts=routes, **more)
    held.append(batch.batch["routed_experts"])
    me.forward_step(batch, run, **more)
    return me.train_step(batch, run, **more)


def _ms_swift(chunks, run, ids, routes, held, more):
    ms_swift.install()
    from swift.megatron.trainers.grpo_trainer import MegatronGRPOTrainer

    me = MegatronGRPOTrainer()
    me.wrapped_models = me.unwrapped_models = chunks
    # It computes log-probs without a schedule that is hooked.
    forward = partial(run, schedules.forward_backward_no_pipelining, forward_only=True)
    me.args = Config(router_replay_mode="R3", forward_step_helper=forward, run=run)
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    rows = pad([torch.cat([part, torch.zeros_like(part[:1])]) for part in routes])
    rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, max(map(len, ids)) - rows.shape[1]))
    held.append(rows)
    batch = {"input_ids": pad(ids), "routed_experts": rows, "seq_lens": list(map(len, ids))}
    me.train_step(iter([batch]), **more)
    return replayer.active().metrics


class Tokenizer:
    pad = 0


def _megatron_rl(chunks, run, ids, routes, held, more):
    from megatron.core import parallel_state
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
    from megatron.core.inference.inference_request import FinishedRequestRecord

    rl, training = map(importlib.import_module, ("megatron.rl.rl_utils", "megatron.training.training"))
    with mock.patch.object(megatron_rl, "_store", RequestRoutes()):
        megatron_rl.install()
        rl.get_inference_interface(None, None, chunks, **more)
        engine = DynamicInferenceEngine()
        engine.controller = SimpleNamespace(inference_wrapped_model=SimpleNamespace(model=chunks[0].module))
        engine.pg_collection = SimpleNamespace(mp=parallel_state.get_model_parallel_group())
        engine.local_metadata_ledger_enabled = True
        engine.requests = [
            SimpleNamespace(request_id=i, prompt_tokens=part[:1], generated_tokens=part[1:].tolist(), policy_epoch=None)
            for i, part in enumerate(ids)
        ]
        held += [part[:, -3:] for part in routes]  # its engine records routers, of which layer 1 has none
        engine.post_process_requests(held, **more)
        ledger = {i: FinishedRequestRecord.from_request(request, **more) for i, request in enumerate(engine.requests)}
        rollouts = [
            [SimpleNamespace(trajectory=[part.tolist()], generation_mask=[], completion_ids=[i])]
            for i, part in enumerate(ids)
        ]
        rl.prepare_data_for_update(chunks, rollouts, Tokenizer, ledger, run, **more)
        metrics, _ = training.train_step(chunks, partial(run, schedules.get_forward_backward_func()), **more)
    return {name: float(value) for name, value in metrics.items() if name.startswith("router_replay/")}


NEWER = {"roll": _roll, "ms_swift": _ms_swift, "megatron_rl": _megatron_rl}
