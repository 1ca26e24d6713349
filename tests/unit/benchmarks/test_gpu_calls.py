"""benchmarks/gpu calls torch.cuda, Transformer Engine and Megatron-Core by names and arguments that they have.

No GPU runs the benchmark here, and Transformer Engine cannot be imported without one: so its calls are read, and compared
with the sources that are installed, or with those of checkouts: GPU_BENCHMARK_SOURCES=<Megatron-LM>:<TransformerEngine>.
"""

import ast
import inspect
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[3] / "benchmarks" / "gpu"
SOURCES = {path.name: path.read_text() for path in FOLDER.glob("*.py")}
LOCAL = {"te": "transformer_engine.pytorch", "autocast": "transformer_engine.pytorch.autocast"}
"""What a name stands for where nothing is imported under it."""


def sources_of(package):
    """Return the folder that a package of sources lies in; nothing is imported but a package around it."""
    places = [Path(place) for place in os.environ.get("GPU_BENCHMARK_SOURCES", "").split(":") if place]
    spec = find_spec(package)
    if spec is not None and spec.origin is not None:
        places.append(Path(spec.origin).parents[package.count(".") + 1])
    for place in places:
        if place.joinpath(*package.split("."), "__init__.py").exists():
            return place
    pytest.skip(f"no sources of {package} here; GPU_BENCHMARK_SOURCES can name a checkout")


def definition(top, dotted):
    """Return the class or function that a dotted name is in the sources under `top`; None: there is none."""
    module, _, name = dotted.rpartition(".")
    path = top.joinpath(*module.split("."))
    package = path.is_dir()
    path = path / "__init__.py" if package else path.with_suffix(".py")
    if not path.exists():
        return None
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in [alias.asname or alias.name for alias in node.names]:
            parents = module.split(".")[: len(module.split(".")) - node.level + package] if node.level else []
            original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
            found = definition(top, ".".join([*parents, *filter(None, [node.module]), original]))
            if found is not None:
                return found
    return None


def is_wrong(node, num_positional, keywords, *, partly):
    """Return why a class or function of the sources does not take these arguments; None: it does."""
    method = isinstance(node, ast.ClassDef)
    if method:
        methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        node = next((each for each in methods if each.name in ("__init__", "__new__")), None)
        if node is None:
            return None
    arguments = node.args
    positional = [each.arg for each in (*arguments.posonlyargs, *arguments.args)][method:]
    known = {*positional, *(each.arg for each in arguments.kwonlyargs)}
    if arguments.kwarg is None and keywords - known:
        return f"has no {sorted(keywords - known)}"
    if arguments.vararg is None and num_positional > len(positional):
        return f"takes {len(positional)} arguments by position, not {num_positional}"
    needed = set(positional[num_positional : len(positional) - len(arguments.defaults)])
    return f"needs {sorted(needed - keywords)}" if needed - keywords and not partly else None


def calls(source):
    """Yield (dotted name, number of positional arguments, keywords, whether there are more) of calls of imported names."""
    tree = ast.parse(source)
    names = dict(LOCAL) | {"torch": "torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def dotted(node):
        if isinstance(node, ast.Attribute):
            return f"{dotted(node.value)}.{node.attr}"
        return names.get(node.id, "?") if isinstance(node, ast.Name) else "?"

    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        partly = dotted(node.func) == "functools.partial"
        function, positional = (node.args[0], node.args[1:]) if partly else (node.func, node.args)
        partly |= any(isinstance(each, ast.Starred) for each in positional) or any(k.arg is None for k in node.keywords)
        yield dotted(function), len(positional), {each.arg for each in node.keywords if each.arg}, partly


def wrong_calls(source, package, top):
    """Return what is wrong with the calls of one package in a source."""
    wrong = []
    for name, positional, keywords, partly in calls(source):
        if not name.startswith(f"{package}."):
            continue
        node = definition(top, name.removesuffix(".__new__"))
        partly |= name.endswith(".__new__")
        why = "is not there" if node is None else is_wrong(node, positional, keywords, partly=partly)
        if why:
            wrong.append(f"{name} {why}")
    return wrong


@pytest.mark.parametrize("package", ["megatron.core", "transformer_engine"])
def test_the_benchmark_calls_what_is_there(package):
    top = sources_of(package)
    names = [name for source in SOURCES.values() for name, *_ in calls(source) if name.startswith(f"{package}.")]
    assert len(names) >= 4, names
    assert [each for source in SOURCES.values() for each in wrong_calls(source, package, top)] == []


def test_the_benchmark_sets_what_a_config_has():
    fields = set()
    for dotted in ("transformer.transformer_config.TransformerConfig", "model_parallel_config.ModelParallelConfig"):
        node = definition(sources_of("megatron.core"), f"megatron.core.{dotted}")
        fields |= {each.target.id for each in node.body if isinstance(each, ast.AnnAssign)}
    used = set()
    for node in (node for source in SOURCES.values() for node in ast.walk(ast.parse(source))):
        target = getattr(getattr(node, "target", None), "id", getattr(node, "name", ""))
        if target in ("RECOMPUTE", "DISPATCHERS", "build_model", "config"):
            inner = [key for each in ast.walk(node) if isinstance(each, ast.Dict) for key in each.keys]
            used |= {key.value for key in inner if isinstance(key, ast.Constant) and "_" in key.value}
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in ("set", "config"):
            used |= {each.arg for each in node.keywords if each.arg}
    assert len(used) > 20, used
    assert used - fields == set()


def test_the_benchmark_calls_what_torch_has():
    wrong = []
    for source in SOURCES.values():
        for name, positional, keywords, partly in calls(source):
            if not name.startswith(("torch.cuda.", "torch.profiler.", "torch.compiler.")):
                continue
            found = torch
            for part in name.split(".")[1:]:
                found = getattr(found, part, None)
            if found is None:
                wrong.append(f"{name} is not there")
                continue
            signature = inspect.signature(found)
            bind = signature.bind_partial if partly else signature.bind
            try:
                bind(*[None] * positional, **dict.fromkeys(keywords))
            except TypeError as error:
                wrong.append(f"{name} {error}")
    assert wrong == []


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("from megatron.core.transformer.module import Float16Modul as F\nF(1, 2)", "Float16Modul is not there"),
        ("from megatron.core.transformer.module import Float16Module as F\nF(1, 2, 3)", "takes 2 .* by position, not 3"),
        ("from megatron.core.transformer.module import Float16Module as F\nF(1)", r"needs \['module'\]"),
        ("from megatron.core.models.gpt import GPTModel\nGPTModel(vocabsize=1)", r"has no \['vocabsize'\]"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_seen(call, why):
    (wrong,) = wrong_calls(call, "megatron.core", sources_of("megatron.core"))
    assert re.search(why, wrong)
