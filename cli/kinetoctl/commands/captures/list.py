"""`kinetoctl captures list`."""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kinetoctl.base.common_options import CommonOptions, common_options, current
from kinetoctl.base.value_types import LABEL
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.fleet.host_client import HostClient
from kinetoctl.client.hosts.host_targets import Place
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.host_options import named_places, place_options
from kinetoctl.options.listing_options import listing_options
from kinetoctl.output.lists.capture_table import CAPTURES
from kinetoctl.output.lists.host_entries import entries_of_hosts
from kinetoctl.output.lists.listing import Entry, ordered, show, watch

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

Found = tuple[list[Entry], ExitCode]


@click.command("list")
@click.option(
    "--label",
    "labels",
    type=LABEL,
    multiple=True,
    help="Only captures with this label, for example team=vision; repeatable.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    default=20,
    metavar="N",
    help="Number of captures to list, the newest of each host.  [default: 20]",
)
@listing_options(CAPTURES.orders, "newest first, host by host")
@place_options
@common_options
def command(
    labels: tuple[tuple[str, str], ...],
    limit: int,
    order: str | None,
    reverse: bool,
    watches: bool,
    interval: int,
    **hosts: Any,
) -> int:
    """List captures, newest first; with several hosts, host by host.

    `kinetoctl captures show ID` shows one, `kinetoctl captures fetch ID` downloads its files.
    """
    settings = current()
    places = named_places(hosts)
    with contextlib.ExitStack() as stack:
        client = None if places else stack.enter_context(Client(settings.address, timeout_s=settings.timeout_s))

        def find() -> Found:
            if client is None:
                return _of_hosts(places, dict(labels), limit, settings)
            found = client.captures(dict(labels), limit=limit)
            return [Entry(item=capture, place={}) for capture in found], ExitCode.DONE

        if watches:
            watch(lambda: ordered(find()[0], CAPTURES, order, reverse=reverse), CAPTURES, settings, interval / 1e9)
            return ExitCode.DONE
        entries, code = find()
    show(ordered(entries, CAPTURES, order, reverse=reverse), CAPTURES, settings)
    return code


def _of_hosts(places: Sequence[Place], labels: dict[str, str], limit: int, settings: CommonOptions) -> Found:
    """The captures of many hosts, as entries_of_hosts."""

    async def captures(client: HostClient, _place: Place) -> "list[pb.Capture]":
        return await client.captures(labels, limit=limit)

    return entries_of_hosts(places, captures, lambda place: {"address": place.address}, settings.timeout_s)
