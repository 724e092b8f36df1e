"""A real browser: Debian's Chromium, driven by playwright, cut off from everything but this machine."""

import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.waiting import scaled, until
from support.web.browsing import LOCAL

AXE = "axe-core@4.10.3"
FETCH_S = 60


@dataclass
class Tab:
    """A page of the browser. problems: what its console said was wrong; elsewhere: addresses that it asked for."""

    page: Any
    problems: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)

    def watch(self) -> "Tab":
        """Listens."""
        self.page.on("console", lambda message: self._said(message))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.on("dialog", lambda dialog: self.problems.append(f"dialog {dialog.message}"))
        return self

    def go(self, address: str) -> None:
        """Goes to an address: again if the page that is left loads itself again at that moment, which aborts it."""
        try:
            self.page.goto(address)
        except Exception as problem:  # Playwright's Error; the package is imported where a browser is there
            if "ERR_ABORTED" not in str(problem):
                raise
            self.page.goto(address)

    def until_said(self, text: str) -> None:
        """Waits until the console has said that something with this text is wrong."""

        def said() -> bool:
            self.page.wait_for_timeout(1)  # what the browser has sent is heard meanwhile
            return any(text in problem for problem in self.problems)

        until(said, f"the console says {text!r}", state=lambda: self.problems)

    def _said(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def _asked(self, url: str) -> None:
        if not url.startswith(LOCAL):
            self.elsewhere.append(url)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser's process.

    While it runs, playwright's event loop runs in this thread, and no test can start another one. So it ends with a
    module's tests, before those of others begin.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs Debian's package chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def new_tab(chromium: Any) -> Iterator[Any]:
    """Opens tabs, each with a session of its own. Options are those of a browser context."""
    contexts = []

    def opened(**options: Any) -> Tab:
        contexts.append(chromium.new_context(**options))
        contexts[-1].set_default_timeout(1000 * scaled(30))
        return Tab(contexts[-1].new_page()).watch()

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, from npm."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm, which fetches axe-core")
    folder = tmp_path_factory.mktemp("axe")
    try:
        subprocess.run([npm, "pack", AXE], cwd=folder, capture_output=True, timeout=scaled(FETCH_S), check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip("npm cannot fetch axe-core here")
    (archive,) = Path(folder).glob("*.tgz")
    with tarfile.open(archive) as packed:
        content = packed.extractfile("package/axe.min.js")
        assert content is not None
        return content.read().decode()
