"""Asks many hosts at once, and returns the answers in the order of the hosts."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from kinetoctl.client.fleet.event_loop import run
from kinetoctl.client.fleet.host_client import HostClient, connected
from kinetoctl.client.hosts.host_targets import Place
from kinetoctl.errors import CliError
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
