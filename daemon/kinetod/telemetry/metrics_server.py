"""Serves /metrics and /health over HTTP, in threads of its own: a scrape never holds up the daemon.

A peer can hurt only itself. Over loopback a peer is a user of this host, otherwise an address. Each may have
MAX_PER_PEER connections at a time and MAX_PER_SECOND new ones, out of MAX_CONNECTIONS in total, some of which are
reserved for peers that have none; more are closed at once. A connection ends after CONNECTION_S, however slowly it
sends or reads. One measurement is made at a time and serves all scrapes that arrived before it began.

Only these two pages are served, and nothing but the host and the requested metric names is read from the request. Over
loopback the host must be an address or localhost: a page of the web may have its own name point here.
"""

import asyncio
import contextlib
import json
import logging
import re
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from kineto_protos.endpoints import is_loopback
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kinetod import __version__
from kinetod.access.peers import UnknownPeer, of_local
from kinetod.base import metrics
from kinetod.base.errors import StartError
from kinetod.config.addresses import ListenAddress
from kinetod.permissions.caller_limits import RESERVE, RequestRate, full, less

log = logging.getLogger(__name__)

REQUEST_S = 5.0
CONNECTION_S = 15.0  # a scrape takes 2 s
MAX_CONNECTIONS = 16
MAX_PER_PEER = 4
MAX_PER_SECOND = 10  # of one peer, on average
POLL_S = 0.5
_TEXT = (("Content-Type", "text/plain; charset=utf-8"),)  # not a list: wsgiref would permanently add its length
_JSON = (("Content-Type", "application/json"),)
_NO_NAME = re.compile(r"(?:localhost|[\d.]+|\[[\da-f:.]+\])?(?::\d+)?", re.ASCII | re.IGNORECASE)  # except that one
DEADLINE_S = 0.2


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:  # name required by the base class
        log.debug("%s: %s", self.address_string(), format % args)

    def address_string(self) -> str:
        return str(self.client_address[0])  # never a look-up


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: ListenAddress) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._lock = threading.Lock()
        self._held = Counter[str]()
        self._open: dict[Any, tuple[str, float]] = {}  # by connection: peer and start
        self._rate = RequestRate(lambda: MAX_PER_SECOND)
        super().__init__((address.host, address.port), _Handler)

    def server_bind(self) -> None:
        """Binds without the base class's look-up of the host name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._enter(request, _peer(request, client_address)):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no more threads
            self._leave(request)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:  # noqa: BLE001  # as the base class does
            self.handle_error(request, client_address)
        finally:
            self._leave(request)
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection to the metrics port broke", exc_info=True)

    def _enter(self, request: Any, peer: str) -> bool:
        """Returns whether this peer may open one more connection, and counts it."""
        with self._lock:
            in_all = MAX_CONNECTIONS - MAX_CONNECTIONS // RESERVE
            if full(self._held[peer], self._held.total(), own=MAX_PER_PEER, in_all=in_all, admin=False) is not None:
                return False
            if self._rate.late_s(peer):
                return False
            self._held[peer] += 1
            self._open[request] = peer, time.monotonic()
        return True

    def _leave(self, request: Any) -> None:
        with self._lock:
            peer, _ = self._open.pop(request)
            less(self._held, peer)

    def service_actions(self) -> None:
        """Ends connections that take too long; called every POLL_S."""
        with self._lock:
            for connection, (_, since) in self._open.items():
                if time.monotonic() - since > CONNECTION_S:
                    with contextlib.suppress(OSError):  # the other end has closed
                        connection.shutdown(socket.SHUT_RDWR)


def _peer(connection: socket.socket, far: tuple[str, int]) -> str:
    """The key by which connections are counted: a user of this host, or an address."""
    if not is_loopback(far[0]):
        return far[0]
    try:
        return of_local(connection.getsockname()[:2], far[:2]).key
    except (UnknownPeer, OSError):
        return "nobody in particular"


class _Shared:
    """A registry that is measured once for all waiting scrapes."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._began = float("-inf")
        self._families: list[Metric] = []

    def collect(self) -> Iterable[Metric]:
        """Every family, as measured after this was called."""
        came = time.monotonic()
        with self._lock:
            if self._began < came:
                self._began = time.monotonic()
                self._families = list(self._registry.collect())
            return self._families

    def restricted_registry(self, names: Collection[str]) -> "_Some":
        """A registry restricted to these sample names, as requested by `name[]`."""
        return _Some(self, frozenset(names))


class _Some:
    """The samples of a registry with one of these names."""

    def __init__(self, registry: _Shared, names: frozenset[str]) -> None:
        self._registry = registry
        self._names = names

    def collect(self) -> Iterable[Metric]:
        """The families that have any of these samples."""
        for family in self._registry.collect():
            samples = [sample for sample in family.samples if sample.name in self._names]
            if samples:
                some = Metric(family.name, family.documentation, family.type, family.unit)
                some.samples = samples
                yield some


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
        self._metrics: Any = make_wsgi_app(_Shared(registry))
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        assert self._server is not None
        return self._server.server_port

    def start(self) -> None:
        """Starts listening. Raises StartError."""
        try:
            self._server = _Server(self._address)
        except OSError as exc:
            raise StartError(
                f"cannot serve metrics on {self._address}: {exc.strerror or exc}; set metrics.listen to another address"
            ) from exc
        self._server.set_app(self._serve)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": POLL_S}, name="metrics", daemon=True
        )
        self._thread.start()
        log.info("metrics on http://%s/metrics", replace(self._address, port=self.port))

    def _serve(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if is_loopback(self._address.host) and not _NO_NAME.fullmatch(environ.get("HTTP_HOST", "")):
            start_response("421 Misdirected Request", [*_TEXT])
            return [b"request this host by its address or as localhost\n"]
        if method not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [*_TEXT, ("Allow", "GET, HEAD")])
            return [b"GET /metrics or /health\n"]
        if path == "/metrics":
            pages: Iterable[bytes] = self._metrics(environ, start_response)
            return pages
        if path == "/health":
            serving = self._healthy()
            start_response("200 OK" if serving else "503 Service Unavailable", [*_JSON])
            status = "SERVING" if serving else "NOT_SERVING"
            return [json.dumps({"status": status, "version": __version__}).encode() + b"\n"]
        start_response("404 Not Found", [*_TEXT])
        return [b"GET /metrics or /health\n"]

    def stop(self) -> None:
        """Stops listening; blocks for at most POLL_S. Scrapes in progress end with the process."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


# The state of the daemon at the moment of a scrape: agents, captures in progress, delay of its event loop.
# This state belongs to the event loop and is read on it. If the loop does not respond within DEADLINE_S, the scrape
# reports no agents and a delay of DEADLINE_S.
@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonState:
    """The number of agents by state (READY, BUSY, INCOMPATIBLE) and of captures that have not ended."""

    agents: Mapping[str, int]
    captures_running: int


class DaemonCollector(Collector):
    """Reads the state on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, read: Callable[[], DaemonState]) -> None:
        self._loop = loop
        self._read = read

    def describe(self) -> Iterable[Metric]:
        """Every family, without values."""
        return _families(None, None)

    def collect(self) -> Iterable[Metric]:
        """Every family."""
        asked = time.perf_counter()
        answer: Future[DaemonState] = Future()

        def read() -> None:
            if answer.set_running_or_notify_cancel():
                answer.set_result(self._read())

        try:
            self._loop.call_soon_threadsafe(read)
            state: DaemonState | None = answer.result(DEADLINE_S)
        except (TimeoutError, RuntimeError):  # it is busy, or closed
            answer.cancel()
            state = None
        return _families(state, time.perf_counter() - asked)


def _families(state: DaemonState | None, delay_s: float | None) -> Iterable[Metric]:
    agents = GaugeMetricFamily("kineto_agents", "Connected agents.", labels=["state"])
    running = GaugeMetricFamily("kineto_captures_running", "Captures that have not ended yet.")
    delay = GaugeMetricFamily(
        "kineto_event_loop_delay_seconds", "Delay until the daemon's event loop handled this scrape."
    )
    if state is not None:
        for name, count in state.agents.items():
            agents.add_metric([name], count)
        running.add_metric([], state.captures_running)
    if delay_s is not None:
        delay.add_metric([], delay_s)
    return agents, running, delay
