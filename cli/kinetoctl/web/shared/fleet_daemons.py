"""The daemons of many hosts, asked for one user: each decides on its own what that user may see and do."""

import shlex
import threading
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.client.daemon_client import Client
from kinetoctl.client.fleet.broadcast import HostAnswer
from kinetoctl.client.fleet.host_client import RETRY_S, HostClient
from kinetoctl.client.fleet.lookup import parts_of
from kinetoctl.client.hosts.host_targets import Place
from kinetoctl.client.selection import Selection
from kinetoctl.client.tracing import has_ended
from kinetoctl.errors import CliError, Denied, NotFound, Unreachable
from kinetoctl.options.trace_arguments import CAPTURE_ID
from kinetoctl.web.pages.daemons import PROGRAM, HostsFound, OfHost, Unanswered
from kinetoctl.web.shared.fleet_hosts import ANSWER_S, FleetHosts, FleetUser

T = TypeVar("T")
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

        async def captures(client: HostClient, _place: Place) -> list[pb.Capture]:
            return await client.captures({}, limit=most)

        answers = self._ask(places, captures)
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

        async def parts(client: HostClient, _place: Place) -> list[pb.Capture]:
            return await parts_of(client, capture_id)

        answers = self._ask(places, parts)
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
        place = next((each for each in self._hosts.places() if each.address == address), None)
        if place is None:
            raise NotFound(f"these pages do not show a host at {address!r:.100}: load the list of processes again")
        key = uuid.uuid4().hex

        async def create(client: HostClient, _place: Place) -> pb.Capture:
            return await client.create(spec, key)

        (answer,) = self._hosts.ask([place], create, user=self._user, timeout_s=self._timeout_s, retry_s=RETRY_S)
        if answer.value is None:
            raise answer.error or Unreachable(f"the daemon at {address} did not answer")
        return answer.value

    def client(self, place: Place) -> AbstractContextManager[Client]:
        """A client of one host, for files."""
        environ = self._hosts.source.environ
        return Client(place.address, timeout_s=self._timeout_s, metadata=self._user.metadata, environ=environ)

    def command(self, *words: str) -> str:
        """The command line that asks the same hosts.

        Of a capture on one host that host; of one on many, what fetches it first, since only files are analysed then.
        """
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
        return Denied(f"no host shows you the capture {capture_id}; {errors[0].place.host}: {errors[0].error}")
    named = "; ".join(f"{answer.place.host}: {answer.error}" for answer in errors[:NAMED])
    more = f"; and {len(errors) - NAMED} more" if len(errors) > NAMED else ""
    return Unreachable(f"no host that answers has a capture {capture_id}; these do not answer: {named}{more}")
