"""Every error carries the code of its cause, and docs/errors.md has a row for each code."""

import ast
import pickle
import re
from pathlib import Path

from megatron_router_replay import errors
from megatron_router_replay.errors import LayoutError, RouterReplayError, listed

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "megatron_router_replay").rglob("*.py"))
CODE = re.compile(r"MRR\d{3}(?=: )")
CLASSES = {name for name, value in vars(errors).items() if isinstance(value, type)}
CLASSES |= {"CaptureError", "TransportError"}


def raised_codes():
    return {code for path in SOURCES if path.name != "errors.py" for code in CODE.findall(path.read_text())}


def documented_codes():
    rows = r'^\| <a id="mrr(\d{3})"></a>MRR(\d{3}) \| [^|]+\. \| [^|]+\. \|$'
    found = re.findall(rows, (ROOT / "docs/errors.md").read_text(), re.M)
    assert all(anchor == code for anchor, code in found)
    return [f"MRR{code}" for _, code in found]


def strings(node):
    return (n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str))


CHECKS = {"_check", "check"}
HELPERS = {"error", "fail", "_write", *CHECKS}
"""Functions that make or raise an error of ours from a message; checks take the condition first."""


def messages_without_a_code(source):
    """Lines of messages of our errors that begin with no code; `error`, which puts a name in front of one, is left out."""
    lines, pending = [], [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef) and node.name == "error":
            continue
        pending += ast.iter_child_nodes(node)
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        arguments = node.args[name in CHECKS :] if name in CLASSES | HELPERS else []
        # A call makes its text somewhere else, such as the joined problems at the end of a session.
        texts = list(strings(arguments[0])) if arguments and not isinstance(arguments[0], ast.Call) else []
        if any(" " in text for text in texts) and not any(CODE.match(text) for text in texts):
            lines.append(node.lineno)
    return sorted(lines)


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


def test_many_numbers_of_a_message_are_named_by_their_runs():
    assert listed([1, 2, 3, 4, 5, 6, 7, 9]) == "1, 2, 3, 4, 5, 6, 7, 9"
    assert listed([*range(3, 61), 62]) == "3 to 60, 62"
    assert listed(range(1, 20, 2)) == "1, 3, 5, 7, 9, 11, 13, 15, ... (10 in all)"
    assert listed("abcdefghij") == "a, b, c, d, e, f, g, h, ... (10 in all)"


def test_a_message_without_a_code_is_noticed():
    source = """
raise LayoutError("cannot do it")
raise LayoutError("MRR204: cannot")
raise source.error(f"has {n} rows")
left = TransportError(f"{name} closed the transport.")
self._check(a != b, "MRR203: tokens moved")
self._check(a != b, "tokens moved")
def error(self, text):
    return PayloadError(f"{self}: {text}")
"""
    assert messages_without_a_code(source) == [2, 4, 5, 7]


def test_every_message_begins_with_a_code():
    wrong = {str(path.relative_to(ROOT)): messages_without_a_code(path.read_text()) for path in SOURCES}
    assert {path: lines for path, lines in wrong.items() if lines} == {}


def test_every_code_has_a_row_and_every_row_a_code():
    codes = documented_codes()
    assert codes == sorted(set(codes))
    assert raised_codes() == set(codes)
