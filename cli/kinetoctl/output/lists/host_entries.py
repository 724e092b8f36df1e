"""Entries of lists from many hosts."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from kinetoctl.client.fleet.broadcast import ask, errors, exit_code, values
from kinetoctl.client.fleet.host_client import HostClient
from kinetoctl.client.hosts.host_targets import Place
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output.console import say
from kinetoctl.output.lists.listing import Entry


def entries_of_hosts(
    places: Sequence[Place],
    load: Callable[[HostClient, Place], Awaitable[Sequence[Any]]],
    told: Callable[[Place], Mapping[str, str]],
    timeout_s: float,
) -> tuple[list[Entry], ExitCode]:
    """What `load` finds on each host. told: what JSON says of the host.

    Reports hosts that do not answer, and raises their error if none answers.
    """
    answers = ask(places, load, timeout_s=timeout_s)
    for text in errors(answers):
        say(text, err=True)
    entries = [
        Entry(item=item, host=place.host, place=told(place)) for place, of_host in values(answers) for item in of_host
    ]
    return entries, exit_code(answers)
