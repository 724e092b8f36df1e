"""The house keeps its sizes: what CONTRIBUTING.md says of files and folders holds."""

from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_PLACES = ("agent", "cli", "daemon", "deploy", "docs", "examples", "protos", "tests")
_SUFFIXES = {".py", ".c", ".h"}
_LINES_MOST = 700
_MODULES_MOST = 20


@pytest.fixture(scope="module")
def sources() -> list[Path]:
    found = [path for place in _PLACES for path in (ROOT / place).rglob("*") if path.suffix in _SUFFIXES]
    return [path.relative_to(ROOT) for path in found if "build" not in path.parts]


def test_no_file_is_longer_than_anybody_reads(sources: list[Path]) -> None:
    lines = {str(path): (ROOT / path).read_bytes().count(b"\n") for path in sources}
    assert {path: count for path, count in lines.items() if count > _LINES_MOST} == {}


def test_no_folder_has_more_modules_than_one_remembers(sources: list[Path]) -> None:
    """A C file and its header are one module."""
    modules: dict[str, set[str]] = defaultdict(set)
    for path in sources:
        if path.stem != "__init__":
            modules[str(path.parent)].add(path.stem)
    assert {folder: len(stems) for folder, stems in modules.items() if len(stems) > _MODULES_MOST} == {}
