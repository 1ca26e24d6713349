"""The parts of the pages that list engines, made from the registry: `python docs/site/engine_pages.py` writes them.

`make docs` and a test compare them with the registry.
"""

from __future__ import annotations

import re
from pathlib import Path

from megatron_router_replay.engines.registry import registered

DOCS = Path(__file__).parents[1]
BEGIN, END = "<!-- engines: docs/site/engine_pages.py writes this part -->\n", "<!-- end of engines -->\n"


def blocks() -> str:
    """What to start, what to send and what comes back, of each engine."""
    parts = []
    for engine in registered():
        request = f"\n```text\n{engine.request}\n```\n" if engine.request else ""
        parts.append(f"### {engine.title}: `engines.{engine.name}`\n\n{engine.start}\n{request}\n{engine.sends}\n")
    return "\n".join(parts)


def table() -> str:
    """Versions and tests of each engine."""
    rows = [f"| {engine.title} | {engine.versions} | {engine.tested} |\n" for engine in registered()]
    return "".join(["| engine | versions | run with |\n", "| --- | --- | --- |\n", *rows])


def reference() -> str:
    """The file of each engine, whose docstring is the specification."""
    lines = "## {0}\n\n::: megatron_router_replay.engines.decoders.{1}\n    options: {{heading_level: 3}}\n"
    return "\n".join(lines.format(engine.title, engine.name) for engine in registered())


PAGES = {"get_routes.md": blocks, "support.md": table, "api/engines.md": reference}


def made(page: str) -> str:
    """Return a page with its part made anew."""
    text = (DOCS / page).read_text()
    assert text.count(BEGIN) == text.count(END) == 1, page
    pattern = re.escape(BEGIN) + ".*?" + re.escape(END)
    part = f"{BEGIN}\n{PAGES[page]()}\n{END}"
    return re.sub(pattern, lambda _: part, text, flags=re.DOTALL)


def outdated() -> list[str]:
    """Return the pages that do not list what is registered."""
    return [page for page in PAGES if made(page) != (DOCS / page).read_text()]


if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(made(name))
