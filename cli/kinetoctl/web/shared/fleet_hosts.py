"""The hosts of a fleet, looked up again and again, and the connections to their daemons that all users share.

Theory of operation
    Calls run on one event loop in a thread of its own, at most CALLS_AT_ONCE at a time, CALLS_OF_USER of one user. A
    connection belongs to a host, not to a user: whom a call is made for goes with each call. Whoever asks many hosts
    waits ANSWER_S for each of them and for all together, and is told which did not answer. A host that was late is not
    waited for again and again: for LATE_S it is told at once. Nor is one that cannot be reached: gRPC keeps trying on
    its own.

    Which hosts there are is looked up when somebody asks and the last answer is older than LOOK_UP_S. That may take
    WAIT_S; then the hosts of before are asked, and the new ones next time. A host that has gone loses its connection.
    Certificates are read again when their files change, for new connections.
"""

import asyncio
import logging
import os
import shlex
import socket
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from kineto_protos import endpoints
from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.client.daemon_client import Client
from kinetoctl.client.fleet.host_client import (
    RETRY_S,
    HostAnswer,
    HostClient,
    HostConnection,
    close_connection,
    connected,
    parts_of,
)
from kinetoctl.client.host_targets import Place, distinct, parse_hosts, template
from kinetoctl.client.selection import Selection
from kinetoctl.client.tracing import has_ended
from kinetoctl.errors import CliError, Denied, NotFound, TimedOut, Unreachable
from kinetoctl.options.trace_arguments import CAPTURE_ID
from kinetoctl.output.stack_page import StackLook, look_of
from kinetoctl.web.pages.page_context import MAX_STACK_BYTES, PROGRAM, HostsFound, OfHost, Unanswered, within

T = TypeVar("T")
CALLS_AT_ONCE, CALLS_OF_USER = 1024, 256
ANSWER_S = 3.0  # of a page
LOOK_S = 12.0  # of a host's stacks: a process takes 0.2 s, or 10 s if it does not answer, and 8 are read at a time
LATE_S = 5.0
LOOK_UP_S = 5.0
WAIT_S = 1.0
GRACE_S = 60.0  # for calls on a connection that is to be closed
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSource:
    """Where hosts are looked up. find: raises ValueError, OSError. name: what people call the fleet.

    before: what stands before a command line that asks the hosts; words: how it names them, if it can. named: whether
    hosts have names; else they are asked for them. environ: with the files and the name by which hosts are verified.
    """

    find: Callable[[], list[Place]]
    name: str
    before: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    named: bool = True
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)


def hosts_of_lists(lists: Sequence[str]) -> HostSource:
    """Hosts as `kinetoctl --hosts` takes them; files are read again. Raises ValueError."""
    address_template = template()

    def find() -> list[Place]:
        return distinct([place for text in lists for place in parse_hosts(text, address_template)])

    find()
    words = tuple(word for text in lists for word in ("--hosts", text))
    return HostSource(find=find, name=", ".join(lists), words=words)


def hosts_of_service(name: str, port: int) -> HostSource:
    """The daemons at each address that the name has. Their certificates are for the name, unless KINETO_TLS_NAME is."""

    def find() -> list[Place]:
        answers = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        found = sorted({str(address[0]) for *_, address in answers})
        return [Place(each, f"[{each}]:{port}" if ":" in each else f"{each}:{port}") for each in found]

    environ = {endpoints.TLS_NAME_VARIABLE: name, **os.environ}
    before = (f"{endpoints.TLS_NAME_VARIABLE}={environ[endpoints.TLS_NAME_VARIABLE]}",)
    return HostSource(find=find, name=f"{name}:{port}", before=before, named=False, environ=environ)


@dataclass(frozen=True, slots=True)
class FleetUser:
    """What is known of the calls for one user. metadata: goes with each call.

    late: until when a host that was late is not asked, by address: for this user alone, who may be why it was.
    """

    metadata: Sequence[tuple[str, str]]
    at_once: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(CALLS_OF_USER))
    late: dict[str, float] = field(default_factory=dict)


class FleetHosts:
    """The hosts and the connections to them. Thread-safe; `close` ends the connections."""

    def __init__(self, source: HostSource, clock: Callable[[], float] = time.monotonic) -> None:
        self.source = source
        self._clock = clock
        self._lock = threading.Lock()
        self._places: tuple[Place, ...] = ()
        self._problem = ""
        self._looked_up_s = float("-inf")
        self._looking: Future[None] | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hosts")
        self._names: dict[str, str] = {}  # by address, of hosts that were asked for them
        self._connections: dict[str, HostConnection] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._stamps: tuple[int, ...] = ()
        self._at_once = asyncio.Semaphore(CALLS_AT_ONCE)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fleet", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all connections."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def problem(self) -> str:
        """Why hosts could not be looked up the last time; empty if they could."""
        return self._problem

    @property
    def known(self) -> tuple[Place, ...]:
        """The hosts that there were the last time."""
        return self._places

    def places(self) -> tuple[Place, ...]:
        """The hosts that there are now. Raises Unreachable if none are known."""
        with self._lock:
            if self._looking is None and self._clock() - self._looked_up_s >= LOOK_UP_S:
                self._looking = self._pool.submit(self._look_up)
            looking = self._looking
        if looking is not None:
            with suppress(FutureTimeout):
                looking.result(WAIT_S)
        with self._lock:
            places, problem = self._places, self._problem
        if not places:
            raise Unreachable(problem or f"the hosts of {self.source.name} are being looked up; try again")
        return tuple(replace(place, host=self._names.get(place.address, place.host)) for place in places)

    def ask(
        self,
        places: Sequence[Place],
        question: Callable[[HostClient, Place], Awaitable[T]],
        *,
        user: FleetUser,
        timeout_s: float = ANSWER_S,
        retry_s: float = 0.0,
    ) -> list[HostAnswer[T]]:
        """The answer or error of each of these hosts, within timeout_s seconds.

        retry_s: as of HostClient; where it is 0, hosts that were late a moment ago are not asked.
        """

        async def answer(place: Place) -> HostAnswer[T]:
            if not retry_s and self._clock() < user.late.get(place.address, float("-inf")):
                return HostAnswer(place, None, _too_late(place, timeout_s))
            try:
                async with asyncio.timeout(timeout_s), user.at_once, self._at_once:
                    connection = self._connection(place.address)
                    client = HostClient(connection, timeout_s=timeout_s, metadata=user.metadata, retry_s=retry_s)
                    return HostAnswer(await self._named(place, client), await question(client, place), None)
            except (CliError, TimeoutError) as exc:
                error = exc if isinstance(exc, CliError) else _too_late(place, timeout_s)
                if isinstance(error, TimedOut):
                    user.late[place.address] = self._clock() + LATE_S
                return HostAnswer(place, None, error)

        async def all_of_them() -> list[HostAnswer[T]]:
            self._renew()
            return list(await asyncio.gather(*map(answer, places)))

        return asyncio.run_coroutine_threadsafe(all_of_them(), self._loop).result()

    # ------------------------------------------------------------ which hosts there are

    def _look_up(self) -> None:
        try:
            found, problem = tuple(self.source.find()), ""
        except (OSError, ValueError) as exc:
            found, problem = (), f"the hosts of {self.source.name} cannot be looked up: {exc}"
            _log.warning("%s", problem)
        with self._lock:
            self._problem = problem
            self._places = found or self._places
            self._looked_up_s = self._clock()
            self._looking = None
            there = [place.address for place in self._places]
        self._loop.call_soon_threadsafe(self._forget, there)

    async def _named(self, place: Place, client: HostClient) -> Place:
        """The place with the name that the host gives itself, if it has none."""
        if not self.source.named and place.address not in self._names:
            with suppress(CliError):
                self._names[place.address] = (await client.host()).hostname or place.host
        return replace(place, host=self._names.get(place.address, place.host))

    # ------------------------------------------------------------ connections, on the event loop

    def _connection(self, address: str) -> HostConnection:
        """Raises UsageProblem."""
        if address not in self._connections:
            self._connections[address] = connected(address, self.source.environ)
        return self._connections[address]

    def _renew(self) -> None:
        """Forgets all connections when the certificates have changed."""
        stamps = tuple(map(self._changed_ns, endpoints.TLS_VARIABLES))
        if stamps != self._stamps:
            self._stamps = stamps
            self._forget(())

    def _changed_ns(self, name: str) -> int:
        try:
            return Path(self.source.environ[name]).stat().st_mtime_ns
        except (KeyError, OSError):
            return 0

    def _forget(self, there: Sequence[str]) -> None:
        """Closes the connections to all other addresses, once their calls have ended."""
        for address in self._connections.keys() - set(there):
            self._names.pop(address, None)
            closing = self._loop.create_task(close_connection(self._connections.pop(address), GRACE_S))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _end(self) -> None:
        closing = [*self._closing]
        for task in closing:
            task.cancel()
        await asyncio.gather(*closing, *map(close_connection, self._connections.values()), return_exceptions=True)


def _too_late(place: Place, timeout_s: float) -> TimedOut:
    return TimedOut(f"the daemon at {place.address} did not answer within {timeout_s:g} s")


LISTED = 2048  # captures of all hosts that are listed before the newest ones are chosen
FEWEST_LISTED = 10  # of each host
MAX_KNOWN = 256  # captures of which it is known where they are
NAMED = 3  # hosts in an error


@dataclass(frozen=True, slots=True)
class _Known:
    """Where a capture is, and who did not answer when that was last asked. complete: no other host can have a part."""

    addresses: tuple[str, ...]
    unanswered: tuple[Unanswered, ...]
    complete: bool


class FleetDaemons:
    """The daemons of the fleet, for one user. metadata: for whom calls are made. timeout_s: of what is not a page."""

    several = True

    def __init__(self, hosts: FleetHosts, metadata: Sequence[tuple[str, str]], timeout_s: float) -> None:
        self._hosts = hosts
        self._user = FleetUser(metadata)
        self._program = (*hosts.source.before, PROGRAM)
        self._timeout_s = timeout_s
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """How many hosts there are."""
        known = len(self._hosts.known)
        return f"{known} host{'' if known == 1 else 's'}"

    def captures(self, limit: int) -> HostsFound[pb.Capture]:
        """The newest captures of each host: fewer of each, if there are many hosts. Raises Unreachable."""
        places = self._hosts.places()
        most = min(limit, max(FEWEST_LISTED, LISTED // len(places)))
        answers = self._ask(places, lambda client, _place: client.captures({}, limit=most))
        full = most < limit and any(len(answer.value or ()) >= most for answer in answers)
        return self._every(answers)._replace(most_of_one=most if full else 0)

    def parts(self, capture_id: str) -> HostsFound[pb.Capture]:
        """The capture, or all its parts. Only the hosts that have some are asked, once that is known.

        Raises NotFound, Unreachable.
        """
        if not CAPTURE_ID.fullmatch(capture_id):
            raise NotFound(f"there is no capture {capture_id}")
        places = self._hosts.places()
        known = self._known.get(capture_id)
        narrowed = known is not None and known.complete and {*known.addresses} <= {each.address for each in places}
        if known is not None and narrowed:
            places = tuple(place for place in places if place.address in known.addresses)
        answers = self._ask(places, lambda client, _place: parts_of(client, capture_id))
        found = _found(answers)
        silent = [each.place.address for each in answers if each.error and not isinstance(each.error, Denied)]
        there = dict.fromkeys(each.place.address for each in found.items)
        ended = bool(there) and not silent and all(has_ended(each.item) for each in found.items)
        self._remember(
            capture_id,
            _Known((*there, *silent) if narrowed else tuple(there), tuple(found.unanswered), narrowed or ended),
        )
        if not found.items:
            raise _nowhere(capture_id, answers)
        return found

    def unanswered(self, capture_id: str) -> Sequence[Unanswered]:
        """The hosts that did not answer when its parts were last looked for."""
        known = self._known.get(capture_id)
        return known.unanswered if known else ()

    def processes(self, *, every: bool) -> HostsFound[pb.Process]:
        """The processes of each host. Raises Unreachable."""

        async def processes(client: HostClient, place: Place) -> list[pb.Process]:
            selector = place.selected(Selection().to_proto())
            return await client.processes(selector, include_without_agent=every, trainers=True)

        return self._every(self._ask(self._hosts.places(), processes))

    def create(self, address: str, spec: pb.CaptureSpec) -> pb.Capture:
        """Starts a capture on this host. Raises NotFound, and the client's errors."""
        place = self._at(address)
        key = uuid.uuid4().hex
        (answer,) = self._hosts.ask(
            [place],
            lambda client, _place: client.create(spec, key),
            user=self._user,
            timeout_s=self._timeout_s,
            retry_s=RETRY_S,
        )
        if answer.value is None:
            raise answer.error or Unreachable(f"the daemon at {address} did not answer")
        return answer.value

    def stacks(self, selector: pb.Selector, address: str | None) -> StackLook:
        """Where these processes stand, on all hosts or on one. Raises NotFound, and the client's errors."""
        places = self._hosts.places() if address is None else (self._at(address),)
        fits, limit_s = within(MAX_STACK_BYTES), min(LOOK_S, self._timeout_s)
        look = look_of(
            self._hosts.ask(
                places,
                lambda client, place: client.stacks(place.selected(selector), fits, limit_s=limit_s),
                user=self._user,
                timeout_s=limit_s + ANSWER_S,  # what has come until then is shown
            )
        )
        problem = [(self._hosts.source.name, self._hosts.problem)] if self._hosts.problem and address is None else []
        return replace(look, failures=[*problem, *look.failures], empty=())

    def _at(self, address: str) -> Place:
        place = next((each for each in self._hosts.places() if each.address == address), None)
        if place is None:
            raise NotFound(f"these pages do not show a host at {address!r:.100}: reload the list of processes")
        return place

    def client(self, place: Place) -> AbstractContextManager[Client]:
        """A client of one host, for files."""
        environ = self._hosts.source.environ
        return Client(place.address, timeout_s=self._timeout_s, metadata=self._user.metadata, environ=environ)

    def command(self, *words: str, address: str = "") -> str:
        """The command line that asks the same hosts, or the one at this address.

        Of a capture on one host that host; of one on many, what fetches it first, since only files are analysed then.
        """
        if address:
            return shlex.join((*self._program, words[0], "--address", address, *words[1:]))
        ids = [word for word in words[1:] if CAPTURE_ID.fullmatch(word)]
        if not ids:
            return shlex.join((*self._program, *words, *self._hosts_named(())))
        found = {each: known.addresses if (known := self._known.get(each)) else () for each in ids}
        addresses = {address for each in found.values() for address in each}
        if len(addresses) == 1 and all(found.values()):
            return shlex.join((*self._program, words[0], "--address", addresses.pop(), *words[1:]))
        fetched = [
            shlex.join((*self._program, "captures", "fetch", *self._hosts_named(where), each))
            for each, where in found.items()
        ]
        shown = [f"kineto-{word}" if word in ids else word for word in words]
        return " && ".join([*fetched, shlex.join((PROGRAM, *shown))])

    def _ask(
        self, places: Sequence[Place], question: Callable[[HostClient, Place], Awaitable[T]]
    ) -> list[HostAnswer[T]]:
        limit_s = min(ANSWER_S, self._timeout_s)
        return self._hosts.ask(places, question, user=self._user, timeout_s=limit_s)

    def _every(self, answers: Sequence[HostAnswer[list[T]]]) -> HostsFound[T]:
        """What all hosts have; with them, why there may be hosts that are not known."""
        found = _found(answers)
        if not (problem := self._hosts.problem):
            return found
        return found._replace(unanswered=[Unanswered(self._hosts.source.name, problem), *found.unanswered])

    def _hosts_named(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """How a command line names the hosts at these addresses; without any: all hosts."""
        if not addresses and self._hosts.source.words:
            return self._hosts.source.words
        addresses = addresses or [place.address for place in self._hosts.known] or ["ADDRESS"]
        return ("--host", addresses[0]) if len(addresses) == 1 else ("--hosts", ",".join(addresses))

    def _remember(self, capture_id: str, known: _Known) -> None:
        with self._lock:
            self._known[capture_id] = known
            self._known.move_to_end(capture_id)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)


def _found(answers: Sequence[HostAnswer[list[T]]]) -> HostsFound[T]:
    return HostsFound(
        [OfHost(answer.place, item) for answer in answers for item in answer.value or ()],
        [Unanswered(answer.place.host, str(answer.error)) for answer in answers if answer.error is not None],
    )


def _nowhere(capture_id: str, answers: Sequence[HostAnswer[list[pb.Capture]]]) -> CliError:
    """Why no host has a part of a capture."""
    errors = [answer for answer in answers if answer.error is not None]
    if not errors:
        return NotFound(f"no host has a capture {capture_id}")
    if len(errors) == len(answers) and all(isinstance(answer.error, Denied) for answer in errors):
        return Denied(
            f"you are not allowed to see capture {capture_id} on any host; {errors[0].place.host}: {errors[0].error}"
        )
    named = "; ".join(f"{answer.place.host}: {answer.error}" for answer in errors[:NAMED])
    more = f"; and {len(errors) - NAMED} more" if len(errors) > NAMED else ""
    return Unreachable(f"none of the responding hosts has capture {capture_id}; not responding: {named}{more}")
