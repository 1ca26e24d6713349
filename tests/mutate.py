"""Break files in one place after another; do the tests notice? python -m tests.mutate FILE... --tests TEST...

A mutant changes one comparison, arithmetic operator, constant, `and` / `or` / `not`, or removes one `raise`. Each runs the
tests in a forked process with a limit of processor time (an endless loop counts as killed). The fork imports the mutant in
place of the file: no file is ever changed, and what every test imports (torch, pytest, hypothesis) was imported once, before.
What survives is printed: a hole in the tests, or a change that makes no difference, for a person to tell. With --names what
is noticed is printed too, with the test that noticed it first. `--again OUTPUT` gives what survived there to slower tests.
The ranks of `on_ranks` are forks of that fork, so they run the mutant too; other processes that a test starts see the file
as it is.

    make mutate FILES="megatron_router_replay/layout/rows.py" KILLERS="tests/unit/layout"
    make mutants                            # a sample from every room, each against the room's own quick tests
"""

from __future__ import annotations

import argparse
import ast
import copy
import gc
import importlib
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CodeType

# What every test needs, so that no fork imports it again; never the package itself, which each fork imports anew.
import hypothesis
import numpy  # noqa: F401
import pytest
import torch

COMPARISONS = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
BOOLEAN = {ast.And: ast.Or, ast.Or: ast.And}

PACKAGE = Path("megatron_router_replay")
# The programs of test_gpu_modes.py run in a process of their own, which does not see the mutant.
SESSIONS = ("tests/unit/mcore", "--ignore=tests/unit/mcore/test_gpu_modes.py")
MCORE = (*SESSIONS, "--ignore=tests/unit/mcore/test_group_check.py")
ROOMS: dict[str, tuple[str, ...]] = {
    "trace": ("tests/unit/trace",),
    "layout": ("tests/unit/layout",),
    "engines": ("tests/unit/engines",),
    "store": ("tests/unit/store",),
    "mcore/model": MCORE,
    "mcore/core": MCORE,
    "mcore/batches": MCORE,
    "mcore/judge": SESSIONS,
    "mcore/sessions": SESSIONS,
    "capture": ("tests/unit/capture",),
    "diagnostics": ("tests/unit/diagnostics",),
    "transport": ("tests/unit/transport", "tests/functional/transport/test_collective.py"),
    "trainers": ("tests/trainers",),
    "cli": ("tests/unit/cli",),
}
"""The folders of the package, one file of it, and the quick tests of each."""


def is_annotation_or_text(node: ast.AST) -> bool:
    return isinstance(node, (ast.JoinedStr, ast.arg, ast.AnnAssign))


def mutable_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node of the code that runs; messages and annotations are left out."""
    for child in ast.iter_child_nodes(tree):
        yield from with_inner_nodes(child)


def with_inner_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node, if it runs, and what runs inside it."""
    if isinstance(node, ast.Raise):
        yield node  # what it says is not mutated
    elif isinstance(node, ast.AnnAssign):
        if node.value is not None:
            yield from with_inner_nodes(node.value)
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        defaults = [*node.args.defaults, *(default for default in node.args.kw_defaults if default)]
        for part in [*defaults, *node.body]:
            yield from with_inner_nodes(part)
    elif not is_annotation_or_text(node):
        yield node
        yield from mutable_nodes(node)


def mutations(node: ast.AST) -> list[ast.AST]:
    """Return the changed copies of one node."""
    found: list[ast.AST] = []
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            changed = copy.deepcopy(node)
            changed.ops[index] = COMPARISONS[type(operator)]()
            found.append(changed)
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in ARITHMETIC:
        changed = copy.deepcopy(node)
        changed.op = ARITHMETIC[type(node.op)]()
        found.append(changed)
    elif isinstance(node, ast.BoolOp):
        changed = copy.deepcopy(node)
        changed.op = BOOLEAN[type(node.op)]()
        found.append(changed)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        found.append(copy.deepcopy(node.operand))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        found.append(ast.Constant(not node.value))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        found.append(ast.Constant(node.value + 1))
    elif isinstance(node, ast.Raise):
        found.append(ast.Pass())
    return found


def replaced(tree: ast.Module, target: ast.AST, mutant: ast.AST) -> str:
    """Return the source with one node replaced."""

    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return ast.copy_location(mutant, node) if node is target else self.generic_visit(node)

    # The nodes of the original are compared by identity, so it is changed in place and parsed anew for the next mutant.
    return ast.unparse(ast.fix_missing_locations(Replace().visit(tree)))


class SameExamples:
    """A plugin: hypothesis tries the same examples on every mutant, and stops at the first that fails."""

    @pytest.hookimpl
    def pytest_collection(self) -> None:
        # Behind the conftest files, which load a profile too, and before the tests, which inherit from the one loaded.
        phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
        hypothesis.settings.register_profile("mutants", deadline=None, derandomize=True, database=None, phases=phases)
        hypothesis.settings.load_profile("mutants")


class FirstFailure:
    """A plugin: writes the name of the test that failed, and the seconds of its run, to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.path.write_text(f"{report.nodeid} is not collected")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.path.write_text(f"{report.nodeid} ({report.duration:.2f} s)")


def run_mutant(tests: list[str], path: Path, source: str | None, cpu_seconds: int) -> None:
    """In a fork: run the tests with `source` in place of the file (None: as it is), and exit with 0 if they pass."""
    os.setpgid(0, 0)  # with its ranks, which end with it
    # Processor time, not the clock's: on a busy machine a limit of the clock would kill mutants that no test notices.
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    # A mutant's bytecode must not be found by the next.
    sys.dont_write_bytecode = True
    torch.set_num_threads(1)
    if source is not None:
        code, get_code = compile(source, str(path), "exec"), SourceFileLoader.get_code

        def mutated(loader: SourceFileLoader, name: str) -> CodeType | None:
            return code if Path(loader.path).resolve() == path.resolve() else get_code(loader, name)

        SourceFileLoader.get_code = mutated  # type: ignore[method-assign]
    from tests.support import workers  # not above: it imports the package

    workers.start_method, workers.longest_s = "fork", 60.0
    # The last one collects garbage five times at the end.
    options = ["-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:unraisableexception"]
    os._exit(int(pytest.main([*options, *tests], plugins=[SameExamples(), FirstFailure(noticed_by(os.getpid()))])))


def noticed_by(pid: int) -> Path:
    """Return the file in which the fork of this number names the test that failed."""
    return Path(tempfile.gettempdir()) / f"noticed_by_{pid}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--tests", nargs="+")
    parser.add_argument("--rooms", nargs="*", choices=ROOMS, help="instead of files: these rooms, or all of them")
    parser.add_argument("--sample", type=int, help="take so many mutants of a room, evenly spread", default=20)
    parser.add_argument("--names", action="store_true", help="print each mutant, with the test that noticed it first")
    parser.add_argument("--again", type=Path, help="take only the mutants that survived in this output of a run before")
    options = parser.parse_args()
    sys.argv[1:] = []  # Megatron-LM's trainer parses them, too
    # A fork ends without cleaning up, and what a test imports (wandb, by way of Megatron-Core) makes folders on import.
    with tempfile.TemporaryDirectory(prefix="mutants_") as folder:
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        if options.rooms is None:
            if not options.files or not options.tests:
                parser.error("name files and their --tests, or --rooms")
            return run_mutants(options, options.files, options.tests)
        for room in options.rooms or ROOMS:
            files = sorted((PACKAGE / room).rglob("*.py")) or [PACKAGE / f"{room}.py"]
            print(f"\n{room}:", flush=True)
            run_mutants(options, files, [*ROOMS[room], "-m", "not slow"], sample=options.sample)
    return 0


def places_in(source: str) -> list[tuple[int, int]]:
    """Return where a file can be broken: the number of a node, and of a mutation of it."""
    return [
        (node_index, mutation_index)
        for node_index, node in enumerate(mutable_nodes(ast.parse(source)))
        for mutation_index in range(len(mutations(node)))
    ]


cpu_seconds_of: dict[tuple[str, ...], int] = {}
"""Tests -> the limit of processor time of a mutant's run, from a run without one."""


def run_mutants(options: argparse.Namespace, files: list[Path], tests: list[str], *, sample: int | None = None) -> int:
    """Run the tests on each mutant in turn; return 0 if none survived.

    Args:
        sample: take so many, evenly spread; None: all.
    """
    if any("mcore" in test or "trainers" in test for test in tests):
        importlib.import_module("megatron.core.models.gpt")
    gc.collect()
    gc.freeze()  # no fork looks through what is imported

    def run(path: Path, source: str | None, cpu_seconds: int) -> BaseProcess:
        fork = multiprocessing.get_context("fork").Process(target=run_mutant, args=(tests, path, source, cpu_seconds))
        fork.start()
        try:
            fork.join()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(fork.pid or 0, signal.SIGKILL)
        return fork

    key = tuple(tests)
    if key not in cpu_seconds_of:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        if run(files[0], None, 600).exitcode != 0:
            print("the tests fail without any mutant")
            return 2
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = usage.ru_utime + usage.ru_stime - before.ru_utime - before.ru_stime
        cpu_seconds_of[key] = 10 + int(3 * spent)

    survivors = options.again.read_text().splitlines() if options.again else None
    sources = {path: path.read_text() for path in files}
    places = [(path, *place) for path, source in sources.items() for place in places_in(source)]
    num_killed = num_survived = 0
    for path, node_index, mutation_index in places[:: max(1, len(places) // sample) if sample else 1]:
        tree = ast.parse(sources[path])
        node = list(mutable_nodes(tree))[node_index]
        mutant = mutations(node)[mutation_index]
        before_and_after = f"{ast.unparse(node).splitlines()[0]}  ->  {ast.unparse(mutant).splitlines()[0]}"
        survived = f"{path}:{node.lineno}: survived: {before_and_after}"
        if survivors is not None and survived not in survivors:
            continue
        fork = run(path, replaced(tree, node, mutant), cpu_seconds_of[key])
        if fork.exitcode == 0:
            num_survived += 1
            print(survived, flush=True)
            continue
        num_killed += 1
        if options.names:
            name = noticed_by(fork.pid or 0)
            words = f"noticed by {name.read_text()}" if name.exists() else "ended"
            print(f"{path}:{node.lineno}: {words}: {before_and_after}", flush=True)
    print(f"{num_killed} killed, {num_survived} survived")
    return 1 if num_survived else 0


if __name__ == "__main__":
    sys.exit(main())
