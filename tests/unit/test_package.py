"""What importing the package costs, and that its public names are there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_router_replay as mrr

PUBLIC = (
    "PositionTrace RoutingTrace RouterReplay RouterReplayAction record replay freeze_recompute explain install uninstall "
    "compare_positions decode_indexer_topk save_trace load_trace concat_traces merge_traces diff_traces engines "
    "RouterReplayError capture diagnostics indexer layout mcore store trainers transport"
).split()


def test_importing_it_loads_none_of_its_parts_and_nothing_that_takes_time():
    code = "import sys; before = set(sys.modules); import megatron_router_replay; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    loaded = {name for name in done.stdout.split() if name.split(".")[0] not in sys.stdlib_module_names}
    assert loaded == {"megatron_router_replay", "megatron_router_replay.errors", "megatron_router_replay.lazy"}


def test_public_names_are_there_and_listed_alone():
    import megatron_router_replay.testing  # noqa: F401  # no public name of the package

    assert set(PUBLIC) <= set(mrr.__all__)
    assert all(getattr(mrr, name) is not None for name in PUBLIC)
    assert dir(mrr) == sorted([*mrr.__all__, "__version__"])
    assert len(set(mrr.__all__)) == len(mrr.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'rekord'"):
        _ = mrr.rekord


def test_the_version_is_the_same_wherever_it_is_written():
    root = Path(__file__).parents[2]
    assert f"\nversion: {mrr.__version__}\n" in (root / "CITATION.cff").read_text()
    newest = re.search(r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$", (root / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] + (".dev0" if newest[2] == "unreleased" else "") == mrr.__version__
