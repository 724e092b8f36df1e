"""Packages with plug-ins, installed where a daemon of the tests finds them, as pip would do it."""

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from support.service.daemon import IMPORT_PATH, REPOSITORY

EXAMPLE = REPOSITORY / "examples" / "accelerator"


def install(site: Path, package: Path, name: str, value: str, *, distribution: str, version: str = "1.0") -> Path:
    """Copies the package's folder into `site` and declares its entry point. Returns the copy."""
    copy = site / package.name
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[kineto.sources]\n{name} = {value}\n")
    for path in (site, copy, info, *copy.rglob("*"), *info.iterdir()):
        path.chmod(path.stat().st_mode & ~0o022)
    return copy


def install_example(site: Path) -> Path:
    """The plug-in of examples/accelerator. Returns its package's folder."""
    return install(
        site, EXAMPLE / "plugin" / "kinetod_pebble", "pebble", "kinetod_pebble:PLUGIN", distribution="kinetod-pebble"
    )


def beside_kinetod(site: Path) -> dict[str, str]:
    """Environment of a daemon that has `site` among its packages."""
    return {"PYTHONPATH": os.pathsep.join([IMPORT_PATH, str(site)])}


def rewrite(file: Path, changes: Mapping[str, str]) -> None:
    """Replaces texts that the file must have."""
    text = file.read_text()
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new)
    file.write_text(text)


def replace_method(file: Path, name: str, body: str) -> None:
    """Gives a method another body, of one line."""
    text = file.read_text()
    changed = re.sub(rf"(    def {name}\(.*?\n)(?:        .*\n|\n(?=        ))+", rf"\g<1>        {body}\n", text)
    assert changed != text, name
    file.write_text(changed)
