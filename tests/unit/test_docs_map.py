"""docs/architecture.md names every folder, and every file that it names is there."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/architecture.md"
_PATH = re.compile(r"`((?:agent|cli|daemon|deploy|docs|protos|tests)/[\w./-]+)`")
MOST_MODULES = 20
_PRODUCT = (
    "agent/kineto_agent", "agent/native", "cli/kinetoctl", "daemon/kinetod", "daemon/kineto_trace", "daemon/native",
)  # fmt: skip


def test_the_map_is_that_of_today() -> None:
    spec = importlib.util.spec_from_file_location("generate_map", ROOT / "docs/generate_map.py")
    assert spec and spec.loader
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    written = DOCUMENT.read_text()
    assert written == generator.with_tables(written), "run `python docs/generate_map.py`"


def test_the_folders_of_c_sources_are_on_the_map() -> None:
    named = set(_PATH.findall(DOCUMENT.read_text()))
    for library in ("agent/native", "daemon/native"):
        for folder in {path.parent for path in (ROOT / library).rglob("*.c")}:
            assert f"{folder.relative_to(ROOT)}/" in named


def test_every_path_that_is_named_is_there() -> None:
    missing = [name for name in _PATH.findall(DOCUMENT.read_text()) if not (ROOT / name).exists()]
    assert missing == []


def test_every_folder_says_its_purpose_and_is_small_enough_to_be_read() -> None:
    for package in _PRODUCT:
        for folder in {path.parent for path in (ROOT / package).rglob("*.[pc]*") if path.suffix in (".py", ".c")}:
            modules = {path.stem for path in folder.iterdir() if path.suffix in (".py", ".c", ".h")}
            assert len(modules) <= MOST_MODULES, f"{folder.relative_to(ROOT)} has {len(modules)} modules"
