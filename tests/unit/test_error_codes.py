"""Every error carries the code of its cause, and docs/errors.md has a section for each code."""

import ast
import pickle
import re
from pathlib import Path

import pytest

from megatron_router_replay import errors
from megatron_router_replay.errors import LayoutError, RouterReplayError

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "megatron_router_replay").rglob("*.py"))
CODE = re.compile(r"MRR\d{3}(?=: )")
CLASSES = {name for name, value in vars(errors).items() if isinstance(value, type)}
CLASSES |= {"CaptureError", "TransportError", "VerlError"}


def raised_codes():
    return {code for path in SOURCES if path.name != "errors.py" for code in CODE.findall(path.read_text())}


def documented_codes():
    return re.findall(r"^### (MRR\d{3})$", (ROOT / "docs/errors.md").read_text(), re.M)


def strings(node):
    return (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def raises_without_a_code(source):
    """Lines that raise an error of ours with a message written there, and no code in it."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        call = node.exc if isinstance(node, ast.Raise) else None
        if not isinstance(call, ast.Call) or not call.args:
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        # A call makes its text somewhere else, such as the joined problems at the end of a session.
        texts = [] if isinstance(call.args[0], ast.Call) else list(strings(call.args[0]))
        is_ours = name in CLASSES or name == "error"
        if is_ours and any(" " in text for text in texts) and not any(CODE.match(text) for text in texts):
            lines.append(node.lineno)
    return lines


def test_the_code_stays_in_front_of_what_an_error_is_wrapped_in():
    inner = LayoutError("MRR204: cannot split 6 positions over tp_size=4")
    outer = LayoutError(f"cannot read sample 2: {inner}")
    assert str(outer) == "MRR204: cannot read sample 2: cannot split 6 positions over tp_size=4"
    assert (inner.code, outer.code, RouterReplayError("no code").code) == ("MRR204", "MRR204", None)
    # A wrapper may have a code of its own, for errors of others; the inner one says more.
    assert str(LayoutError(f"MRR501: no file: {inner}")).startswith("MRR204: no file: cannot split")
    problems = "MRR419: it does not add up:\n  MRR406: a\n  MRR407: b"
    assert str(LayoutError(problems)) == problems


def test_an_error_with_a_code_crosses_processes_and_is_caught_as_before():
    error = pickle.loads(pickle.dumps(LayoutError("sample 2: MRR204: no")))
    assert (str(error), error.code, type(error)) == ("MRR204: sample 2: no", "MRR204", LayoutError)
    assert isinstance(error, ValueError)


def test_a_message_without_a_code_is_noticed():
    source = (
        'raise LayoutError("cannot do it")\nraise LayoutError("MRR204: cannot")\nraise source.error(f"has {n} rows")'
    )
    assert raises_without_a_code(source) == [1, 3]


def test_every_message_begins_with_a_code():
    if not raised_codes():
        pytest.skip("no raise carries a code yet")
    wrong = {str(path.relative_to(ROOT)): raises_without_a_code(path.read_text()) for path in SOURCES}
    assert {path: lines for path, lines in wrong.items() if lines} == {}


def test_every_code_has_a_section_and_every_section_a_code():
    codes = documented_codes()
    assert codes == sorted(set(codes))
    if not raised_codes():
        pytest.skip("no raise carries a code yet")
    assert raised_codes() == set(codes)
