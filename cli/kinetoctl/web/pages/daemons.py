"""The daemons whose captures and processes the pages show: one here, those of a fleet in `shared.fleet_hosts`."""

import shlex
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, NamedTuple, Protocol, TypeVar

from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.client.daemon_client import Client
from kinetoctl.client.host_targets import Place
from kinetoctl.client.selection import Selection
from kinetoctl.errors import NotFound

T = TypeVar("T")
PROGRAM = "kinetoctl"


class OfHost(NamedTuple, Generic[T]):
    """Something that a daemon has. place: which daemon."""

    place: Place
    item: T


class Unanswered(NamedTuple):
    """A host that did not answer, and why."""

    host: str
    reason: str


class HostsFound(NamedTuple, Generic[T]):
    """What the daemons have, and which of them did not answer."""

    items: Sequence[OfHost[T]]
    unanswered: Sequence[Unanswered] = ()
    most_of_one: int = 0  # items that each host was asked for, if that may be fewer than it has


class Daemons(Protocol):
    """What pages ask of daemons, with the rights of the user who looks."""

    several: bool  # whether pages name hosts

    @property
    def name(self) -> str:
        """What people call them all."""

    def captures(self, limit: int) -> HostsFound[pb.Capture]:
        """The newest captures, at most so many of a host. Raises the client's errors if no host can be asked."""

    def parts(self, capture_id: str) -> HostsFound[pb.Capture]:
        """The capture with this id, or all parts of the one that `kinetoctl trace --hosts` made under it.

        Raises NotFound and the client's errors.
        """

    def unanswered(self, capture_id: str) -> Sequence[Unanswered]:
        """The hosts that did not answer when the parts of this capture were last looked for."""

    def processes(self, *, every: bool) -> HostsFound[pb.Process]:
        """What `kinetoctl ps` lists; every: with --all. Raises the client's errors if no host can be asked."""

    def create(self, address: str, spec: pb.CaptureSpec) -> pb.Capture:
        """Starts a capture on the daemon at this address; empty: the only one. Raises the client's errors."""

    def client(self, place: Place) -> AbstractContextManager[Client]:
        """A client of one daemon, for files."""

    def command(self, *words: str) -> str:
        """The command line that asks them the same."""


class OneDaemon:
    """The daemon at one address. connect: opens a client of it."""

    several = False

    def __init__(self, connect: Callable[[], AbstractContextManager[Client]], address: str) -> None:
        self._connect = connect
        self._place = Place("", address)

    @property
    def name(self) -> str:
        """Its address."""
        return self._place.address

    def captures(self, limit: int) -> HostsFound[pb.Capture]:
        """The newest captures. Raises the client's errors."""
        with self._connect() as client:
            return self._found(client.captures({}, limit=limit))

    def parts(self, capture_id: str) -> HostsFound[pb.Capture]:
        """The one capture. Raises the client's errors."""
        with self._connect() as client:
            return self._found([client.capture(capture_id)])

    def unanswered(self, _capture_id: str) -> Sequence[Unanswered]:
        """None: a daemon that does not answer is an error of the page."""
        return ()

    def processes(self, *, every: bool) -> HostsFound[pb.Process]:
        """The processes. Raises the client's errors."""
        with self._connect() as client:
            return self._found(
                client.processes(Selection().to_proto(), include_without_agent=every, trainers=True),
            )

    def create(self, address: str, spec: pb.CaptureSpec) -> pb.Capture:
        """Starts a capture. Raises NotFound for another daemon, and the client's errors."""
        if address:
            raise NotFound(f"these pages do not show the host at {address}")
        with self._connect() as client:
            return client.create(spec, uuid.uuid4().hex)

    @contextmanager
    def client(self, _place: Place) -> Iterator[Client]:
        """A client."""
        with self._connect() as client:
            yield client

    def command(self, *words: str) -> str:
        """The command line, with the address."""
        return shlex.join((PROGRAM, words[0], "--address", self._place.address, *words[1:]))

    def _found(self, items: "Sequence[T] | Iterator[T]") -> HostsFound[T]:
        return HostsFound([OfHost(self._place, item) for item in items])
