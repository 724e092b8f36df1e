"""A web page that runs in this process on files, and a client that says exactly what it sends."""

import http.client
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.web.application import RunningWeb, WebOptions, running_web
from kinetoctl.web.http.web_messages import origin

from support.waiting import scaled, until

NO_DAEMON = "unix:/nowhere/kinetod.sock"
LOCAL = ("http://127.0.0.1:", "http://localhost:", "data:", "blob:")  # how addresses of this machine begin


@dataclass(frozen=True)
class Page:
    """One answer."""

    status: int
    text: str
    headers: Mapping[str, str]


@dataclass
class Browser:
    """One session with the server, without a real browser."""

    web: RunningWeb
    cookie: str = ""

    @property
    def own(self) -> str:
        """The origin of the pages."""
        return origin(self.web.pages.port)

    def ask(self, path: str, method: str = "GET", fields: Mapping[str, str] | None = None, **headers: str) -> Page:
        """One request. headers: their names with underscores; they replace what is sent otherwise."""
        answer, content = self._asked(path, method, fields, headers)
        return Page(answer.status, content.decode("utf-8", "replace"), dict(answer.getheaders()))

    def raw(self, path: str) -> bytes:
        """The bytes of an answer."""
        return self._asked(path, "GET", None, {})[1]

    def _asked(
        self, path: str, method: str, fields: Mapping[str, str] | None, headers: Mapping[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        at = self.web.pages.port
        sent = {"Host": f"127.0.0.1:{at}", "Cookie": self.cookie}
        body = urlencode(fields) if fields is not None else None
        if body is not None:
            sent |= {"Content-Type": "application/x-www-form-urlencoded", "Origin": self.own}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", at, timeout=scaled(30))
        try:
            connection.request(method, path, body, {name: value for name, value in sent.items() if value})
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    def enter(self) -> Page:
        """Uses the token."""
        found = self.ask("/enter", "POST", {"token": self.web.sessions.token})
        self.cookie = found.headers.get("Set-Cookie", "").partition(";")[0]
        return found

    def shown(self, path: str) -> Page:
        """The page with its results, however long they take."""
        found: list[Page] = []

        def complete() -> bool:
            found[:] = [self.ask(path)]
            return "Refresh" not in found[0].headers

        until(complete, f"the results of {path}")
        return found[0]

    def form_secret(self, path: str) -> str:
        """The secret of the forms on a page."""
        match = re.search(r'name="form_secret" value="([^"]+)"', self.ask(path).text)
        assert match
        return match[1]


@contextmanager
def browsing(traces: Sequence[Path] = (), address: str = NO_DAEMON, editor: str = "") -> Iterator[Browser]:
    """A server and a client that has entered."""
    settings = CommonOptions(address=address, output="table", color=False, quiet=True, timeout_s=scaled(60))
    with running_web(WebOptions(traces=[str(path) for path in traces], editor=editor), settings) as web:
        browser = Browser(web)
        browser.enter()
        browser.shown("/")  # the traces were looked for
        yield browser


def exchange(port: int, data: bytes) -> bytes:
    """Sends bytes and returns everything that comes back until the connection closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=scaled(30)) as sock:
        sock.sendall(data)
        received = b""
        while part := sock.recv(65_536):
            received += part
        return received
