"""Check what `make docs` needs beyond links; write build/docs/<version>, and the list of versions next to it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[2]
PACKAGE = "megatron_router_replay"


def on_config(config: Any) -> Any:
    """Put the version into the folder's name and the title."""
    version = str(re.search(r'__version__ = "(.+)"', (ROOT / PACKAGE / "__init__.py").read_text())[1])  # type: ignore[index]
    config.site_name = f"{config.site_name} {version}"
    config.site_dir = str(Path(config.site_dir) / version)
    return config


def on_post_build(config: Any) -> None:
    """Fail if the pages lack a public name; list the versions that were built.

    Raises:
        PluginError: names of an `__all__` that are on no page.
    """
    # The inventory names every object that got a heading, under the path that the reference shows it at.
    inventory = config.plugins["mkdocstrings"].handlers.inventory
    missing = undocumented_names(set(inventory))
    if missing:
        raise PluginError("public names without an entry or a docstring:\n  " + "\n  ".join(missing))
    show_navigation_from(Path(config.site_dir) / "assets" / "stylesheets", "70em")
    folder = Path(config.site_dir).parent
    versions = sorted((path.name for path in folder.iterdir() if path.is_dir()), reverse=True)
    entries = [{"version": name, "title": name, "aliases": []} for name in versions]
    (folder / "versions.json").write_text(json.dumps(entries))
    newest = Path(config.site_dir).name
    (folder / "index.html").write_text(f'<meta http-equiv="refresh" content="0; url={newest}/index.html">\n')


def show_navigation_from(stylesheets: Path, width: str) -> None:
    """Show the navigation on the left from this width on; the theme hides it below 76.25em, which is 1,220 pixels.

    Raises:
        PluginError: the theme's stylesheets have a different limit.
    """
    below = f"{float(width.removesuffix('em')) - 0.015625}em"
    for name in ("main", "palette"):
        (sheet,) = stylesheets.glob(f"{name}.*.min.css")
        text = sheet.read_text()
        if "76.25em" not in text or "76.234375em" not in text:
            raise PluginError(f"{sheet.name} has no limit of 76.25em, at which the theme shows the navigation")
        sheet.write_text(text.replace("76.25em", width).replace("76.234375em", below))


def undocumented_names(entries: set[str]) -> list[str]:
    """Return what is wrong with the public names: all in the `__all__` of the package and of its public packages."""
    package = griffe.load(PACKAGE, search_paths=[str(ROOT)], resolve_aliases=True)
    public = [package] + [
        member
        for name, member in sorted(package.modules.items())
        if name in DOCUMENTED or name in (package.exports or ())
    ]
    wrong = []
    for module in public:
        for export in sorted(str(name) for name in module.exports or ()):
            target = module[export]
            imported = module.imports.get(export, target.path)
            if target.is_module and imported not in (target.path, target.canonical_path):
                wrong.append(f"{module.path}.{export} is {imported}, and a module of that name hides it")
                continue
            if not target.has_docstring:
                wrong.append(f"{module.path}.{export} has no docstring")
            shown = {f"{module.path}.{export}", target.canonical_path} & entries
            if target.is_module:  # has a page, and no heading of its own
                shown = {entry for entry in entries if entry.startswith(f"{target.canonical_path}.")}
            # A package without public names, as trainers, has a page of its docstring alone.
            if not shown and not (target.is_module and target.exports == []):
                wrong.append(f"{module.path}.{export} is on no page of docs/api")
    return wrong


DOCUMENTED = {"errors", "testing", "trace"}
"""Modules of the reference that the package's own `__all__` does not name."""
