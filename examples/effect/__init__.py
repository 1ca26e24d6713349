"""Effects of routing replay, measured on a CPU: `make effect`, docs/effect.md.

python -m examples.effect gap       # how much of the gap between engine and trainer routing causes; --engine vllm
python -m examples.effect freeze    # recomputes that flip in plain training, and the error of their gradients
python -m examples.effect rl        # training runs: off, R2, R3, and R3 with planted faults
python -m examples.effect figures   # the SVGs in docs/images from the results in this folder

policy.py    the tiny policy of 32 experts, and the int8 weights that the engine gets
arms.py      what each arm replays; the planted faults
rl.py        one training run: the pieces of examples/grpo with the engine's log-probs as the old ones
floor.py     log-probs with every router forced to given experts, by twenty lines that do without this library
freeze.py    plain training under activation checkpointing, with and without `freeze_recompute`
results.py   figures to JSON and back;  figures.py  JSON to SVG
"""
