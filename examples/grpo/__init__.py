"""GRPO on Megatron-Core with rollout routing replay, small enough to run on a CPU and to be copied into a trainer.

    python -m examples.grpo train --replay r3                 # one run; see --help for layouts, engines, checkpoints
    python -m examples.grpo compare                           # off, r2, r3 from the same start: table and picture

In the order that data moves:

    task.py          prompts and a reward that code can verify
    rollout.py       samples: tokens, log-probs and routes, from transformers in bf16 with routes captured
    vllm_engine.py   the same from a vLLM server over HTTP
    batch.py         samples -> packed micro-batches, where routing_rows are one more field
    loss.py          advantages, clipped loss, KL: tensors to tensors
    trainer.py       Megatron-Core: model, optimizer, old-policy pass, update; the lines that replay adds are marked
    weights.py       Megatron-Core -> Hugging Face names, for the engine's next rollout
    loop.py          one training run;  compare.py, plot.py: several of them side by side

To lift it into a trainer: the lines marked "# replay" in trainer.py, the `routing_rows` field in batch.py, `choose_trace` in
loop.py. On a CPU Megatron runs over gloo by `megatron_router_replay.testing`, its distributed optimizer too; on GPUs
neither is needed. The old log-probs are the trainer's: those of its own forward, under r3 with the engine's routes.
"""
