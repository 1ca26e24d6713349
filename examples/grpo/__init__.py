"""GRPO on Megatron-Core with rollout routing replay, small enough to run on a CPU and to be copied into a trainer.

    python -m examples.grpo train --replay r3                 # one run; see --help for layouts, engines, checkpoints
    python -m examples.grpo train --transport distributed     # rollouts and routes from two processes of their own; or ray
    python -m examples.grpo compare                           # off, r2, r3 from the same start: table and picture

In the order that data moves:

    task.py          prompts and a reward that code can verify
    rollout.py       samples: tokens, log-probs and routes, from transformers in bf16 with routes captured
    vllm_engine.py   the same from a vLLM server over HTTP
    worker.py        a rollout worker: rolls out its share, decodes, sends every training rank its routes
    routes.py        how routes come to the training ranks: handed over by rank 0, or from rollout workers over
                     torch.distributed or Ray
    batch.py         samples -> packed micro-batches
    loss.py          advantages, clipped loss, KL: tensors to tensors
    trainer.py       Megatron-Core: model, optimizer, old-policy pass, update; the lines that replay adds are marked
    weights.py       Megatron-Core -> Hugging Face names, for the engine's next rollout
    loop.py          one training run;  compare.py, plot.py: several of them side by side

To lift it into a trainer: the lines marked "# replay" in trainer.py, and `choose_trace` in
loop.py. Where engines are processes of their own, worker.py and routes.py too: a training rank gets the routes of its
data-parallel samples and its pipeline stage's layers only. Each step then prints how
long training waited for routes, and for what; metrics.jsonl has the seconds of both sides under
`router_replay/transport/`, those of the slowest worker.

The routes of a trained policy, for `router-replay inspect` or to measure with: train, then add one large rollout, as in
`train --resume --steps 31 --prompts 128 --per-prompt 16 --save-routes routes.safetensors`.

On a CPU Megatron runs over gloo by `megatron_router_replay.testing`, its distributed optimizer too; on GPUs neither is
needed. The old log-probs are the trainer's: those of its own forward, under r3 with the engine's routes.
"""
