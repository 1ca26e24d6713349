"""Hooks on functions of modules that are imported now, later or never, and the check of a checkout."""

import importlib.util
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from megatron import core as megatron_core

from megatron_router_replay.errors import SeamError
from megatron_router_replay.trainers import seams, slime
from tests.support import miles_fork
from tests.trainers import rebuilt
from tests.trainers.sources import check_renames

pytestmark = pytest.mark.usefixtures("megatron")


def test_a_module_that_waits_is_hooked_once_however_often_it_is_looked_for(tmp_path, monkeypatch):
    (tmp_path / "looked_for.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    seams.hook(seams.Seam("looked_for", "double", "x"), lambda original, x: original(x) + 1)
    for _ in range(2):
        importlib.util.find_spec("looked_for")
    module = importlib.import_module("looked_for")
    del sys.modules["looked_for"]
    assert module.double(3) == 7
    assert "exec_module" not in vars(module.__loader__)
    assert "looked_for" not in seams._finder.waiting


def test_a_method_with_text_at_the_left_margin_is_read(tmp_path, monkeypatch):
    text = 'class Actor:\n    def fill(self, data):\n        """Fill.\n\nqueues of data\n        """\n        return data\n'
    (tmp_path / "margin.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("margin")
    seams.hook(seams.Seam("margin", "Actor.fill", "self data", words="queues"), lambda original, me, data: -data)
    assert module.Actor().fill(3) == -3
    seams.Seam("margin", "Actor.fill", "self data", words="queues").check(seams.source_of(text, "Actor.fill"))


@pytest.mark.parametrize("arguments", [[], ["slime"], ["nobody", "."], ["audit", "."]])
def test_the_check_of_a_checkout_says_how_it_is_called(arguments):
    with pytest.raises(SystemExit, match=r"python -m megatron_router_replay\.trainers\.seams TRAINER FOLDER"):
        seams.main(arguments)


@pytest.mark.parametrize("part", ["..", "slime", "nothing"])
def test_a_folder_that_is_no_checkout_is_not_taken_for_a_trainer_that_moved(part, tmp_path):
    folder = rebuilt.write(tmp_path / "checkout", rebuilt.SOURCES["slime"])
    wrong = str(Path(folder, part))
    with pytest.raises(
        SystemExit, match=f"^no slime in {wrong}: it has neither slime/backends/megatron_utils/actor.py nor"
    ):
        seams.main(["slime", wrong])


@pytest.mark.parametrize("name", rebuilt.SOURCES)
def test_whatever_a_trainer_renames_is_named(name, tmp_path, capsys):
    check_renames(name, rebuilt.write(tmp_path, rebuilt.SOURCES[name]), capsys)


def test_what_moved_is_counted_also_in_a_module_that_became_a_package(tmp_path, capsys):
    folder = rebuilt.write(tmp_path, rebuilt.SOURCES["slime"])
    module = tmp_path / "slime/backends/megatron_utils/actor.py"
    package = module.with_suffix("")
    package.mkdir()
    module = module.rename(package / "__init__.py")
    assert seams.main(["slime", folder]) == 0
    assert capsys.readouterr().out.endswith("\n5 of 5 as known\n")
    module.write_text(module.read_text().replace("def fill_routing_replay", "def fill"))
    assert seams.main(["slime", folder]) == 1
    out = capsys.readouterr().out
    assert "fill_routing_replay is gone: this slime is newer or older than the commits" in out
    assert out.endswith("\n4 of 5 as known\n")


@pytest.mark.parametrize("fork", ["own", "miles-main", "unknown", "none"])
def test_the_check_of_a_checkout_says_whether_this_megatron_can_be_replayed(fork, tmp_path, monkeypatch, capsys):
    folder = rebuilt.write(tmp_path, rebuilt.SOURCES["miles"])
    if fork == "none":  # a driver's environment
        monkeypatch.setitem(sys.modules, "megatron.core", None)
    elif fork != "own":
        miles_fork.install(monkeypatch, fork)
    faults = seams.main(["miles", folder])
    *_, megatron, last = capsys.readouterr().out.splitlines()
    says = {
        "unknown": "UNKNOWN   Megatron-Core .*MRR402.* a fork",
        "none": "not here  Megatron-Core .* miles's workers$",
    }
    assert re.match(says.get(fork, rf"as known  Megatron-Core {re.escape(megatron_core.__version__)} in /"), megatron)
    assert (faults, last) == (fork == "unknown", "6 of 6 as known")


def test_a_batch_without_a_field_is_named(trainer):
    with pytest.raises(SeamError, match=r"fill_routing_replay gets a batch without \['tokens'\]: it has \['ids'\]"):
        seams.take(slime.FILL, {"ids": []}, "tokens")


def test_a_module_that_is_imported_later_is_checked_then(trainer, monkeypatch):
    monkeypatch.setattr(seams._finder, "waiting", {})  # every later import of the module would raise
    gone = seams.Seam(
        module="slime.backends.megatron_utils.actor", name="MegatronTrainRayActor.fill", parameters="self"
    )
    seams.hook(gone, None)
    assert "slime.backends.megatron_utils.actor" not in sys.modules
    with pytest.raises(
        SeamError, match=r"MRR808: slime.backends.megatron_utils.actor.MegatronTrainRayActor.fill is gone"
    ):
        __import__("slime.backends.megatron_utils.actor")


def test_a_module_whose_seam_moved_raises_in_each_attempt_to_import_it(tmp_path, monkeypatch):
    """A trainer that catches the first error, as lazy modules do, must not get the module without its hooks."""
    (tmp_path / "moved_twice.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    seams.hook(seams.Seam("moved_twice", "double", "x"), lambda original, x: original(x) + 1)
    seams.hook(seams.Seam("moved_twice", "triple"), None)
    for _ in range(2):
        with pytest.raises(SeamError, match=r"MRR808: moved_twice\.triple is gone"):
            importlib.import_module("moved_twice")
    (tmp_path / "moved_twice.py").write_text("def double(x):\n    return 2 * x\n\n\ndef triple(x):\n    return 3 * x\n")
    importlib.invalidate_caches()
    assert importlib.import_module("moved_twice").double(3) == 7
    del sys.modules["moved_twice"]
    assert "moved_twice" not in seams._finder.waiting


# ---- a module that imports the hooks in its own lines
HOOKS = """
from megatron_router_replay.trainers import seams
seams.hook(seams.Seam("{name}", "{function}", "x"), lambda original, x: original(x) + 1)
"""
MODULE = """
def double(x):
    return 2 * x
"""


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("indirect", [True, False])
def test_a_module_may_import_its_hooks_in_any_line(is_first, indirect, tmp_path, monkeypatch):
    """In its first line, where imports go, the module has no function yet."""
    name = f"any_line_{is_first}_{indirect}".lower()
    hooks = HOOKS.format(name=name, function="double")
    if indirect:  # a module that imports them for it
        (tmp_path / f"of_{name}.py").write_text(hooks)
        hooks = f"import of_{name}\n"
    (tmp_path / f"{name}.py").write_text(hooks + MODULE if is_first else MODULE + hooks)
    (tmp_path / f"user_of_{name}.py").write_text(f"from {name} import double\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = list(seams._finder.waiting)
    assert importlib.import_module(f"user_of_{name}").double(3) == 7
    module = sys.modules[name]
    assert module.double(3) == 7
    assert type(module.__spec__) is ModuleSpec
    assert list(seams._finder.waiting) == before


@pytest.mark.parametrize("is_first", [True, False])
def test_a_module_that_imports_hooks_of_a_function_that_is_gone_raises_in_each_attempt(is_first, tmp_path, monkeypatch):
    name = f"gone_{is_first}".lower()
    hooks = HOOKS.format(name=name, function="triple")
    path = tmp_path / f"{name}.py"
    path.write_text(hooks + MODULE if is_first else MODULE + hooks)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(seams._finder, "waiting", {})
    for _ in range(2):
        with pytest.raises(SeamError, match=rf"MRR808: {name}\.triple is gone"):
            importlib.import_module(name)
        assert name not in sys.modules


def test_a_module_that_fails_after_it_imported_its_hooks_gets_them_in_the_next_attempt(tmp_path, monkeypatch):
    hooks = HOOKS.format(name="fails_once", function="double")
    (tmp_path / "fails_once.py").write_text(f"{hooks}import fails_once_if\n{MODULE}")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="fails_once_if"):
        importlib.import_module("fails_once")
    (tmp_path / "fails_once_if.py").write_text("")
    importlib.invalidate_caches()
    assert importlib.import_module("fails_once").double(3) == 7
