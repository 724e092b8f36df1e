"""The pages for many users, served in this process, and clients that connect through a proxy's socket or with TLS."""

import http.client
import socket
import ssl
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.web.analyses.analysis_queue import WorkerLimits
from kinetoctl.web.http.web_messages import Origins
from kinetoctl.web.shared.doors import WebTlsFiles
from kinetoctl.web.shared.fleet_hosts import HostSource
from kinetoctl.web.shared.serving import ProxyDoor, RunningShared, SharedOptions, TcpDoor, running_shared

from support.waiting import scaled, until
from support.web.browsing import Page

ORIGIN = "https://web.example:8443"
HEADER = "X-Remote-User"


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=scaled(60))
        self._path = str(path)

    def connect(self) -> None:
        """Connects to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True)
class SharedWeb:
    """A server that runs, and how to reach it."""

    running: RunningShared
    socket: Path

    def ask(
        self,
        path: str,
        user: str = "",
        method: str = "GET",
        fields: Mapping[str, str] | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        **headers: str,
    ) -> Page:
        """One request: of a user whom the proxy names, or with TLS. headers: with underscores; they replace others."""
        sent = {"Host": ORIGIN.removeprefix("https://"), HEADER: user if tls is None else ""}
        body = urlencode(fields) if fields is not None else None
        if body is not None:
            sent |= {"Content-Type": "application/x-www-form-urlencoded", "Origin": ORIGIN}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = self._connection(tls)
        try:
            connection.request(method, path, body, {name: value for name, value in sent.items() if value})
            answer = connection.getresponse()
            return Page(answer.status, answer.read().decode("utf-8", "replace"), dict(answer.getheaders()))
        finally:
            connection.close()

    def shown(self, path: str, user: str) -> Page:
        """The page with its results, however long they take."""
        found: list[Page] = []

        def complete() -> bool:
            found[:] = [self.ask(path, user)]
            return found[0].status != 429 and "Refresh" not in found[0].headers

        until(complete, f"the results of {path}")
        return found[0]

    def _connection(self, tls: ssl.SSLContext | None) -> http.client.HTTPConnection:
        if tls is None:
            return _UnixConnection(self.socket)
        assert self.running.port is not None
        return http.client.HTTPSConnection("localhost", self.running.port, timeout=scaled(60), context=tls)


@contextmanager
def sharing(
    address: str,
    *,
    proxies: Sequence[int] = (0,),
    files: WebTlsFiles | None = None,
    ui_origin: str = "",
    hosts: HostSource | None = None,
) -> Iterator[SharedWeb]:
    """Serves the pages of the daemon at this address, or of these hosts. files: opens a door with TLS, too."""
    settings = CommonOptions(address=address, output="table", color=False, quiet=True, timeout_s=scaled(30))
    with tempfile.TemporaryDirectory(prefix="kw-") as folder:
        path = Path(folder) / "web.sock"
        options = SharedOptions(
            origins=Origins(ORIGIN, ui_origin),
            tcp=TcpDoor(host="127.0.0.1", port=0, ui=None, files=files) if files is not None else None,
            proxy=ProxyDoor(socket=path, ui=path.with_name("web.sock.ui") if ui_origin else None, uids=proxies),
            user_header=HEADER,
            limits=WorkerLimits(memory_bytes=2 << 30, job_s=round(scaled(60)), answer_bytes=32 << 20),
            user_space=1 << 30,
            hosts=hosts,
        )
        with running_shared(options, settings) as running:
            yield SharedWeb(running, path)
