"""Source lines as links to an editor, in a real browser."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kinetoctl.commands.web import EDITORS
from support.web.browsing import Browser, browsing

pytestmark = pytest.mark.slow
JOB = Path(__file__).parents[2] / "data/h200/ddp4"
FRAMES = (
    "/job/train.py(12): run",
    "/job/a?b#c%41.py(7): quoted",
    '/job/a"><img src=x>.py(8): markup',
    "/job/\u202e/x.py(3): turned",
    "//server/share/x.py(3): elsewhere",
    "relative.py(3): nowhere",
    "javascript:alert(1)//x.py(3): acts",
    "/etc/passwd(3): other",
)


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Path:
    events = [
        {"ph": "X", "cat": "python_function", "name": name, "pid": 1, "tid": 1, "ts": 10 * at, "dur": 5}
        for at, name in enumerate(FRAMES)
    ]
    path = tmp_path_factory.mktemp("frames") / "frames.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


@pytest.fixture(scope="module")
def server(frames: Path) -> Iterator[Browser]:
    with browsing([frames, JOB], editor=EDITORS["vscode"]) as found:
        yield found


def shown(new_tab: Any, server: Browser, place: int, view: str) -> Any:
    """The tab with the page of a view."""
    trace_id = re.findall(r'href="/c/(\w+)"', server.ask("/").text)[place]
    tab = new_tab()
    tab.go(server.web.address)
    tab.page.get_by_role("heading", name="Traces").wait_for()
    server.shown(f"/c/{trace_id}/view/{view}")
    tab.go(f"{server.own}/c/{trace_id}/view/{view}")
    tab.page.locator("tbody tr").first.wait_for()
    assert tab.problems == []
    return tab


def links(tab: Any) -> dict[str, str]:
    """Text and address of the links to the editor."""
    found = tab.page.locator("main a[title='Open in the editor']")
    return {each.text_content(): each.get_attribute("href") for each in found.all()}


def test_frames_lead_to_absolute_paths_alone_and_nothing_in_them_acts(new_tab: Any, server: Browser) -> None:
    assert links(shown(new_tab, server, 0, "event_selection")) == {
        "/job/train.py(12)": "vscode://file/job/train.py:12",
        "/job/a?b#c%41.py(7)": "vscode://file/job/a%3Fb%23c%2541.py:7",
    }


def test_a_file_in_a_column_of_its_own_is_a_link(new_tab: Any, server: Browser) -> None:
    assert links(shown(new_tab, server, 1, "hot_lines")) == {"train.py": "vscode://file/job/train.py:1"}


def test_a_file_and_its_line_in_two_columns_are_a_link(new_tab: Any, server: Browser) -> None:
    tab = shown(new_tab, server, 1, "hot_lines")
    tab.page.evaluate("""() => {
      const row = (tag, texts) => texts.map((text) => {
        const cell = document.createElement(tag);
        const inner = tag === "th" ? cell.appendChild(document.createElement("button")) : cell;
        inner.textContent = text;
        if (tag === "th") inner.dataset.figure = text;
        return cell;
      });
      document.querySelector("main thead tr").replaceChildren(...row("th", ["v.file", "v.line"]));
      document.querySelector("main tbody tr").replaceChildren(...row("td", ["/job/\\"%25 x.py", "1,234"]));
      return import("/static/editor.js?again");
    }""")
    assert links(tab)['/job/"%25 x.py'] == "vscode://file/job/%22%2525%20x.py:1234"


def test_frames_of_samples_are_links(new_tab: Any, server: Browser) -> None:
    found = links(shown(new_tab, server, 1, "python_samples"))
    assert any(re.fullmatch(r"vscode://file/.*/torch/optim/adam\.py:\d+", address) for address in found.values())


def test_without_an_editor_there_is_no_link(frames: Path) -> None:
    with browsing([frames]) as browser:
        page = browser.ask("/").text
        assert "data-editor" not in page
        assert "editor.js" not in page
