"""What importing the package costs, and that its public names are there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_router_replay as mrr

PUBLIC = (
    "RoutingTrace RouterReplay RouterReplayAction record replay freeze_recompute explain install uninstall save_trace "
    "load_trace concat_traces merge_traces diff_traces engines RouterReplayError"
).split()
PACKAGES = "capture diagnostics engines layout mcore store trainers transport".split()


def in_a_fresh_interpreter(code: str) -> object:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def test_importing_it_loads_none_of_its_parts_and_nothing_that_takes_time():
    loaded = in_a_fresh_interpreter(
        "import json, sys; before = set(sys.modules); import megatron_router_replay; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    ours = [name for name in loaded if name.startswith("megatron_router_replay")]
    assert ours == ["megatron_router_replay", "megatron_router_replay.errors", "megatron_router_replay.lazy"]
    packages = {name.split(".")[0] for name in loaded} - sys.stdlib_module_names
    assert packages == {"megatron_router_replay"}


def test_every_public_name_is_there_and_listed():
    for name in [*PUBLIC, *PACKAGES]:
        assert getattr(mrr, name) is not None
        assert name in mrr.__all__
        assert name in dir(mrr)


def test_dir_shows_public_names_alone():
    import megatron_router_replay.testing  # noqa: F401  # no public name of the package

    assert dir(mrr) == sorted([*mrr.__all__, "__version__"])
    assert len(set(mrr.__all__)) == len(mrr.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'rekord'"):
        _ = mrr.rekord


def test_the_version_is_the_same_wherever_it_is_written():
    root = Path(__file__).parents[2]
    assert f"\nversion: {mrr.__version__}\n" in (root / "CITATION.cff").read_text()
    newest = re.search(r"^## (\S+) \((unreleased|\d{4}-\d\d-\d\d)\)$", (root / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] + (".dev0" if newest[2] == "unreleased" else "") == mrr.__version__


def test_the_issue_template_asks_for_what_doctor_says():
    root = Path(__file__).parents[2]
    assert "router-replay doctor --json" in (root / ".github/ISSUE_TEMPLATE/bug.md").read_text()
