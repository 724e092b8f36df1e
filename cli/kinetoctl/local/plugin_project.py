"""Writes the project of a new plug-in from the files of plugin_template/.

In those, $name stands for the plug-in's name, and so does NAME in the names of files. The project is written beside its
place, checked as kinetod would, and then moved there: so no half of one is left, and what is written can be installed.
"""

import re
import shutil
import string
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kinetoctl.errors import NotWritten, PluginRefused, ProjectExists, UsageProblem
from kinetoctl.local.plugin_check import check_plugin

TEMPLATE = Path(__file__).with_name("plugin_template")
_SUFFIX = ".template"
_NAME = re.compile(r"[a-z0-9]{1,40}")  # what may be part of a path; kinetod decides what a plug-in may be called


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginProject:
    """A project that was written. files: relative to its folder."""

    folder: Path
    files: list[str]


def write_project(name: str, parent: Path) -> PluginProject:
    """Raises UsageProblem, PluginRefused, ProjectExists, NotWritten."""
    if not _NAME.fullmatch(name):
        raise UsageProblem(f"{name!r:.60} cannot be the name of a plug-in; expected lower-case letters and digits")
    folder = parent / f"kinetod-{name}"
    if folder.exists() or folder.is_symlink():
        raise ProjectExists(f"the folder {folder} exists already; nothing was written")
    try:
        with tempfile.TemporaryDirectory(prefix=f".kinetod-{name}-", dir=parent) as temporary:
            made = Path(temporary, folder.name)
            files = _fill(made, name)
            checked = check_plugin(str(made))
            if checked.refused:
                raise PluginRefused(f"kinetod would not take a plug-in of the name {name!r}: {checked.refused}")
            for cache in made.rglob("__pycache__"):
                shutil.rmtree(cache)
            made.rename(folder)
    except OSError as exc:
        raise NotWritten(f"{folder} cannot be written: {exc.strerror}") from exc
    return PluginProject(folder=folder, files=files)


def _fill(made: Path, name: str) -> list[str]:
    files = []
    for template in sorted(TEMPLATE.rglob(f"*{_SUFFIX}")):
        relative = str(template.relative_to(TEMPLATE)).removesuffix(_SUFFIX).replace("NAME", name)
        file = made / relative
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(string.Template(template.read_text()).substitute(name=name, title=name.capitalize()))
        files.append(relative)
    return files
