"""Asks many hosts at once, and returns the answers in the order of the hosts."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.store.upload_manifest import FLEET_LABEL

from kinetoctl.client.fleet.fleet_run import run
from kinetoctl.client.fleet.host_client import HostClient, connected
from kinetoctl.client.fleet.host_run import Fleet, HostRun, stored_clock
from kinetoctl.client.host_targets import Place
from kinetoctl.errors import CliError, NotFound
from kinetoctl.exit_codes import ExitCode

T = TypeVar("T")
CALLS_AT_ONCE = 256


class HostAnswer(NamedTuple, Generic[T]):
    """The answer of one host: a value, or an error."""

    place: Place
    value: T | None
    error: CliError | None


def ask(
    places: Sequence[Place], question: Callable[[HostClient, Place], Awaitable[T]], *, timeout_s: float
) -> list[HostAnswer[T]]:
    """The answer or error of every host."""

    async def all_of_them() -> list[HostAnswer[T]]:
        at_once = asyncio.Semaphore(CALLS_AT_ONCE)
        return list(await asyncio.gather(*(one(place, at_once) for place in places)))

    async def one(place: Place, at_once: asyncio.Semaphore) -> HostAnswer[T]:
        async with at_once:
            try:
                client = HostClient(connected(place.address), timeout_s=timeout_s)
                try:
                    return HostAnswer(place, await question(client, place), None)
                finally:
                    await client.close()
            except CliError as exc:
                return HostAnswer(place, None, exc)

    return run(all_of_them)


def errors(answers: Sequence[HostAnswer[T]]) -> list[str]:
    """One message for each host without an answer."""
    return [f"{answer.place.host}: {answer.error}" for answer in answers if answer.error is not None]


def exit_code(answers: Sequence[HostAnswer[T]]) -> ExitCode:
    """The exit code of a command that shows the answers: PARTIAL if a host did not answer."""
    return ExitCode.DONE if all(answer.error is None for answer in answers) else ExitCode.PARTIAL


def values(answers: Sequence[HostAnswer[T]]) -> list[tuple[Place, T]]:
    """The answers of the hosts that answered. Raises the first error if none did."""
    found = [(answer.place, answer.value) for answer in answers if answer.error is None and answer.value is not None]
    first = next((answer.error for answer in answers if answer.error is not None), None)
    if not found and first is not None:
        raise first
    return found


LIMIT = 1000  # captures of one host that are parts of one capture


async def parts_of(client: HostClient, capture_id: str) -> list[pb.Capture]:
    """The parts of the capture on one host; empty if it has none."""
    found = await client.captures({FLEET_LABEL: capture_id}, limit=LIMIT)
    try:
        return found or [await client.capture(capture_id)]
    except NotFound:
        return []


def find_fleet(places: Sequence[Place], capture_id: str, *, timeout_s: float) -> Fleet:
    """The parts of the capture on these hosts: captures with its label, or the one capture with this id.

    A host that does not answer becomes a member with its error. Raises NotFound if no host has a part.
    """

    async def parts(client: HostClient, _place: Place) -> list[pb.Capture]:
        return await parts_of(client, capture_id)

    members = []
    for place, captures, error in ask(places, parts, timeout_s=timeout_s):
        if error is not None:
            members.append(HostRun(place, error=error))
        members += [HostRun(place, each, clock=stored_clock(each), started=True) for each in captures or ()]
    if not any(member.capture for member in members):
        raise next((m.error for m in members if m.error), NotFound(f"no host has a capture {capture_id}"))
    return Fleet(id=capture_id, members=members)
