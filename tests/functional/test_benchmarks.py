"""Every part of `make bench` runs, and `benchmarks.host`, at a size that says nothing about speed."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PARTS = {
    "router": """
import torch
from benchmarks import router
from megatron_router_replay.testing import ParallelSizes
from tests.support.one_rank import only_rank
with only_rank():
    ParallelSizes().initialize()
    for name in router.ROUTERS:
        for backward in (False, True):
            found = router.measure_shape(32, name, torch.float32, backward=backward, repeats=1)
            assert all(len(seconds) == 1 for seconds in found.values()), found
""",
    "step": """
from dataclasses import replace
from benchmarks import step
tiny = replace(step.TINY, sequence=16, microbatches=2)
cases = [step.Case(model=tiny, repeats=2, recompute=True), step.Case(model=tiny, repeats=2, pp_size=2)]
raw = step.measure(cases)
rendered = step.render(raw)
assert "replay / off, tiny, full recompute" in rendered and "replay / off, tiny, PP2" in rendered
""",
    "memory": """
import gc
from benchmarks import memory
gc.freeze()  # what is imported need not be looked through for each count
memory.LAYERS, memory.EXPERTS, memory.TOKENS = 2, 16, 16
assert "ours, freeze |" in memory.render(memory.measure())
""",
    "capture": """
from benchmarks import capture
size = capture.Size(hidden=64, layers=2, experts=8, topk=2, batch=2, prompt=4, new=3)
assert capture.render([capture.measure_size(size, 1)]).count('%') == 2
""",
    "decode": "from benchmarks import decode; assert 'int32' in decode.render(decode.measure(64, repeats=1))",
    "store": "from benchmarks import store; assert 'load, safetensors' in store.render(store.measure(64, repeats=1))",
}
HOST = """
from benchmarks import host
host.NUM_TOKENS, host.NUM_LAYERS = 4, 2
raw = {("8, 2", kind): host.measure("8, 2", kind, repeats=2) for kind in host.CHECKPOINTS}
assert [name for name in host.CHECKPOINTS if f"8, 2 | {name} |" not in host.render(raw)] == []
"""


def test_every_part_is_here():
    from benchmarks import __main__ as bench

    assert set(PARTS) == set(bench.PARTS)


def test_every_part_runs():
    """In one process: what a part takes is mostly the import of Megatron-Core."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    lines = [f"print({part!r}, flush=True)\n{code.strip()}" for part, code in {**PARTS, "host": HOST}.items()]
    code = f"if __name__ == '__main__':\n{textwrap.indent(chr(10).join(lines), '    ')}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
