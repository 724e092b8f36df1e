"""The pictures of the web page in the documentation: a script takes them, and web.md shows them."""

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.slow
DOCS = Path(__file__).parents[3] / "docs"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_screenshots", DOCS / "generate_screenshots.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_script_takes_every_picture_that_the_documentation_shows(script: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Debian's package chromium")
    script.take(tmp_path, chromium)
    text = (DOCS / "web.md").read_text()
    for name in script.PICTURES:
        taken, shown = (folder / name for folder in (tmp_path, DOCS / "images"))
        assert taken.read_bytes().startswith(PNG) and shown.read_bytes().startswith(PNG)
        assert taken.stat().st_size > 20_000, name  # not an empty page
        assert f"](images/{name})" in text
