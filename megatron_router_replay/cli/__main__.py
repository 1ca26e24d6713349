"""`python -m megatron_router_replay.cli`."""

from megatron_router_replay.cli import run

run()
