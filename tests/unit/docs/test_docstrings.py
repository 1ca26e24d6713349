"""Docstrings of public names begin with one short sentence."""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[3] / "megatron_router_replay"


def public_names():
    for path in PACKAGE.rglob("__init__.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                yield from ast.literal_eval(node.value)


def documented(names):
    """Yield (name, docstring) of public functions and classes, and of their methods and properties."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in names:
                methods = node.body if isinstance(node, ast.ClassDef) else []
                for item in (node, *methods):
                    is_public = item is node or (isinstance(item, ast.FunctionDef) and not item.name.startswith("_"))
                    if is_public and (text := ast.get_docstring(item)):
                        yield item.name, text


def test_first_sentences_of_public_docstrings_fit_80_characters():
    texts = list(documented(set(public_names())))
    assert len(texts) > 70
    first = [(name, re.split(r"(?<=\.)\s", " ".join(text.split()))[0]) for name, text in texts]
    assert [(name, sentence) for name, sentence in first if len(sentence) > 80] == []
