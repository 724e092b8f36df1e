"""`kinetoctl ps`."""

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kinetoctl.base.common_options import CommonOptions, common_options, current
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.selection import Selection
from kinetoctl.errors import NotFound
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.selection_options import named_places, place_options, selector_options
from kinetoctl.output.console import say
from kinetoctl.output.listing import PROCESSES, Entry, listing_options, ordered, show, watch

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

    from kinetoctl.client.fleet.host_client import HostClient
    from kinetoctl.client.host_targets import Place

Found = tuple[list[Entry], ExitCode]


def _of_hosts(places: "Sequence[Place]", selector: "pb.Selector", every: bool, settings: CommonOptions) -> Found:
    """The processes of many hosts, as entries_of_hosts."""
    from kinetoctl.output.listing import entries_of_hosts  # 60 ms that one host does not need

    async def processes(client: "HostClient", place: "Place") -> "list[pb.Process]":
        return await client.processes(place.selected(selector), include_without_agent=every, trainers=True)

    return entries_of_hosts(places, processes, lambda place: {"host": place.host}, settings.timeout_s)


def _here(client: Client, selector: "pb.Selector", every: bool) -> Found:
    """The processes of one host."""
    found = client.processes(selector, include_without_agent=every, trainers=True)
    return [Entry(item=process, place={}) for process in found], ExitCode.DONE


@click.command("ps")
@click.option(
    "--all", "include_without_agent", is_flag=True, help="Every Python and GPU process, whether or not it trains."
)
@listing_options(PROCESSES.orders, "by pid, host by host")
@selector_options
@place_options
@common_options
def command(
    include_without_agent: bool,
    order: str | None,
    reverse: bool,
    watches: bool,
    interval: int,
    selection: Selection,
    **hosts: Any,
) -> int:
    """List processes that train or use a GPU, and whether they can be traced.

    Listed are processes that have an agent, hold a context on a GPU or were started with KINETO_USE_DAEMON, and Python
    processes that have loaded torch, JAX, TensorFlow or CuPy, have a GPU open, show the signs of a plug-in's
    accelerator, have a rank or belong to a job.
    Launchers and DataLoader workers are left out. --all lists every Python and GPU process. With options that select
    processes, it lists those that `kinetoctl trace` would record with the same options.

    TRACE is ready (an agent is waiting), attached (likewise; `kinetoctl trace` attached it for a while), attach
    (`kinetoctl trace` will attach one; nothing was seen that prevents it), busy (a capture is running), or why there
    can be no trace; `kinetoctl doctor PID` says more. KINETO is polls where the process's own libkineto asks kinetod
    for requests, as it would ask Dynolog, and traces while it records. ITER is the number of training iterations that
    the agent has counted, ITER/S how many there are in a second now.
    """
    settings = current()
    places = named_places(hosts)
    selects = bool(selection) or any(place.selects for place in places)
    selector = selection.to_proto()
    with contextlib.ExitStack() as stack:
        client = None if places else stack.enter_context(Client(settings.address, timeout_s=settings.timeout_s))

        def find() -> Found:
            if client is None:
                return _of_hosts(places, selector, include_without_agent, settings)
            return _here(client, selector, include_without_agent)

        if watches:
            watch(lambda: ordered(find()[0], PROCESSES, order, reverse=reverse), PROCESSES, settings, interval / 1e9)
            return ExitCode.DONE
        entries, code = find()
    show(ordered(entries, PROCESSES, order, reverse=reverse), PROCESSES, settings)
    if not entries and selects:
        raise NotFound("no process matches")
    if not entries and not settings.quiet:
        say(
            "no process shows a sign of training; `kinetoctl ps --all` lists every Python process, and "
            "`kinetoctl trace PID` traces any of them",
            err=True,
        )
    return code
