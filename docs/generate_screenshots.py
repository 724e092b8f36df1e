"""Takes the pictures of the web page in web.md: `python docs/generate_screenshots.py`, or `make screenshots`.

`kinetoctl web` serves the capture of four ranks on four H200 (tests/data/h200/ddp4), and headless Chromium looks at it.
Needs the package playwright (`pip install playwright`) and a Chromium in the path. Fonts differ between machines, so
that nothing compares the bytes; a test takes all pictures.
"""

import argparse
import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/images"
JOB = ROOT / "tests/data/h200/ddp4"
WIDTH, HEIGHT = 1100, 720
_ENTRY = re.compile(r"http://127\.0\.0\.1:\d+/\S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """path: below the page of the trace. scheme: of colours. wait: for an element with this selector."""

    path: str
    scheme: str = "light"
    wait: str = "table"


PICTURES: Mapping[str, Picture] = {
    "web-capture.png": Picture(path="", wait="svg"),
    "web-operators.png": Picture(path="/view/operators?rank=0&chart=device_self_us", wait="svg"),
    "web-ranks.png": Picture(path="/ranks", wait="svg"),
    "web-flame.png": Picture(path="/flame?of=kernels&rank=0", scheme="dark", wait="svg"),
}


@contextlib.contextmanager
def served(trace: Path) -> Iterator[str]:
    """The address that lets a browser in. The server runs beside the trace, so that pages have no longer path."""
    command = [sys.executable, "-m", "kinetoctl", "web", "--no-browser", trace.name]
    with subprocess.Popen(
        command, cwd=trace.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as web:
        try:
            said = ""
            while not (found := _ENTRY.search(said)):
                line = web.stdout.readline() if web.stdout else ""
                if not line:
                    raise SystemExit(f"kinetoctl web ended: {said}")
                said += line
            yield found[0]
        finally:
            web.terminate()


def take(folder: Path, chromium: str) -> None:
    """Takes all pictures into the folder."""
    from playwright.sync_api import sync_playwright

    with served(JOB) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
        page = context.new_page()
        page.goto(address)
        link = page.get_by_role("link", name=JOB.name, exact=True)
        link.wait_for()
        trace = page.evaluate("(link) => link.href", link.element_handle())
        for name, picture in PICTURES.items():
            _take(page, trace, picture, folder / name)
        browser.close()


def _take(page: Any, trace: str, picture: Picture, file: Path) -> None:
    page.emulate_media(color_scheme=picture.scheme)
    page.goto(f"{trace}{picture.path}")
    page.wait_for_selector(f"main {picture.wait}", timeout=120_000)  # the page loads itself again until it has it
    page.screenshot(path=file)


def main() -> None:
    """Takes them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("there is no chromium in the path: install Debian's package chromium")
    take(parser.parse_args().folder, chromium)


if __name__ == "__main__":
    main()
