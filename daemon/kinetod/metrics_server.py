"""Serves /metrics and /health over HTTP, in threads of its own: a scrape never holds up the daemon.

A peer can hurt only itself: one that sends nothing is cut after REQUEST_S, and at most MAX_CONNECTIONS are open,
more are closed at once. Nothing but these two pages is served, and nothing is taken from the request but the names
that Prometheus asks for.
"""

import json
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from kinetod import __version__, metrics
from kinetod.config import ListenAddress
from kinetod.errors import StartError

log = logging.getLogger(__name__)

REQUEST_S = 5.0
MAX_CONNECTIONS = 16
POLL_S = 0.5
_TEXT = [("Content-Type", "text/plain; charset=utf-8")]
_JSON = [("Content-Type", "application/json")]


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:  # the base class names it
        log.debug("%s: %s", self.address_string(), format % args)

    def address_string(self) -> str:
        return str(self.client_address[0])  # never a look-up


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: ListenAddress) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((address.host, address.port), _Handler)

    def server_bind(self) -> None:
        """Without the base class's look-up of the host's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads
            self._free.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection to the metrics port broke", exc_info=True)


class MetricsServer:
    """Serves until `stop`.

    collectors: besides the daemon's own. healthy: whether the daemon serves, asked from other threads.
    """

    def __init__(self, address: ListenAddress, collectors: Iterable[Collector], *, healthy: Callable[[], bool]) -> None:
        self._address = address
        self._healthy = healthy
        registry = CollectorRegistry()
        for collector in (metrics.REGISTRY, *collectors):
            registry.register(collector)
        self._metrics: Any = make_wsgi_app(registry)
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port that is listened on."""
        assert self._server is not None
        return self._server.server_port

    def start(self) -> None:
        """Listens. Raises StartError."""
        try:
            self._server = _Server(self._address)
        except OSError as exc:
            raise StartError(
                f"cannot serve metrics on {self._address}: {exc.strerror or exc}; choose another metrics.listen"
            ) from exc
        self._server.set_app(self._serve)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": POLL_S}, name="metrics", daemon=True
        )
        self._thread.start()
        log.info("metrics on http://%s/metrics", replace(self._address, port=self.port))

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if method not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [*_TEXT, ("Allow", "GET, HEAD")])
            return [b"GET /metrics or /health\n"]
        if path == "/metrics":
            pages: Iterable[bytes] = self._metrics(environ, start_response)
            return pages
        if path == "/health":
            serving = self._healthy()
            start_response("200 OK" if serving else "503 Service Unavailable", _JSON)
            status = "SERVING" if serving else "NOT_SERVING"
            return [json.dumps({"status": status, "version": __version__}).encode() + b"\n"]
        start_response("404 Not Found", _TEXT)
        return [b"GET /metrics or /health\n"]

    def stop(self) -> None:
        """Listens no more; blocks for POLL_S at most. Scrapes under way are dropped with the process."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
