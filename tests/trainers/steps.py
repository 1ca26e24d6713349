"""Run a rebuilt trainer from its rollout to its optimizer."""

from functools import partial

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_router_replay.trainers import miles, nemo_rl, skyrl, slime
from tests.trainers import oracle
from tests.trainers.slime import Args

SOURCES = ["slime", "miles", "nemo_rl", "skyrl"]
ARGS = Args(use_rollout_routing_replay=True)


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in [each for each in folder.rglob("*") if each.is_dir()]:
        (path / "__init__.py").touch()
    return str(folder)


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
