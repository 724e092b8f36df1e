"""`kinetoctl ps`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kinetoctl.base.common_options import CommonOptions, common_options, current
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.selection import Selection
from kinetoctl.errors import NotFound
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.host_options import named_places, place_options
from kinetoctl.options.selection_options import selector_options
from kinetoctl.output.console import print_table, say
from kinetoctl.output.json_yaml import emit, plain
from kinetoctl.output.process_table import table

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

    from kinetoctl.client.fleet.host_client import HostClient
    from kinetoctl.client.hosts.host_targets import Place

Shown = tuple[list["pb.Process"], ExitCode]


def _show(processes: "Sequence[pb.Process]", settings: CommonOptions, hosts: Sequence[str] = ()) -> None:
    """Prints a table. hosts: the host of each process, if there are several."""
    columns, rows = table(processes, wide=settings.wide)
    if hosts:
        columns = ["HOST", *columns]
        rows = [[host, *row] for host, row in zip(hosts, rows, strict=True)]
    print_table(columns, rows, color=settings.color)


def _of_hosts(places: "Sequence[Place]", selector: "pb.Selector", every: bool, settings: CommonOptions) -> Shown:
    """Prints the processes of many hosts, and reports hosts that do not answer. Raises their error if none answers."""
    from kinetoctl.client.fleet.broadcast import ask, errors, exit_code, values  # 60 ms that one host does not need

    async def processes(client: "HostClient", place: "Place") -> "list[pb.Process]":
        return await client.processes(place.selected(selector), include_without_agent=every, trainers=True)

    answers = ask(places, processes, timeout_s=settings.timeout_s)
    for text in errors(answers):
        say(text, err=True)
    found = [(place, process) for place, of_host in values(answers) for process in of_host]
    if settings.output == "table":
        _show([process for _, process in found], settings, [place.host for place, _ in found])
    else:
        emit([{"host": place.host, **plain(process)} for place, process in found], settings.output)
    return [process for _, process in found], exit_code(answers)


def _here(selector: "pb.Selector", every: bool, settings: CommonOptions) -> Shown:
    """Prints the processes of one host."""
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        processes = client.processes(selector, include_without_agent=every, trainers=True)
    if settings.output == "table":
        _show(processes, settings)
    else:
        emit([plain(process) for process in processes], settings.output)
    return processes, ExitCode.DONE


@click.command("ps")
@click.option(
    "--all", "include_without_agent", is_flag=True, help="Every Python and GPU process, whether or not it trains."
)
@selector_options
@place_options
@common_options
def command(include_without_agent: bool, selection: Selection, **hosts: Any) -> int:
    """List processes that train or use a GPU, and whether they can be traced.

    Listed are processes that have an agent or hold a context on a GPU, and Python processes that have loaded torch,
    JAX, TensorFlow or CuPy, have a GPU open, have a rank or belong to a job. Launchers and DataLoader workers are left
    out. --all lists every Python and GPU process. With options that select processes, it lists those that
    `kinetoctl trace` would record with the same options.

    TRACE is ready (an agent is waiting), attached (likewise; `kinetoctl trace` attached it for a while), attach
    (`kinetoctl trace` will attach one; nothing was seen that prevents it), busy (a capture is running), or why there
    can be no trace; `kinetoctl doctor PID` says more. ITER is the number of training iterations that the agent has
    counted, ITER/S how many there are in a second now.
    """
    settings = current()
    places = named_places(hosts)
    selects = bool(selection) or any(place.selects for place in places)
    selector = selection.to_proto()
    if places:
        processes, code = _of_hosts(places, selector, include_without_agent, settings)
    else:
        processes, code = _here(selector, include_without_agent, settings)
    if not processes and selects:
        raise NotFound("no process matches")
    if not processes and not settings.quiet:
        say(
            "no process shows a sign of training; `kinetoctl ps --all` lists every Python process, and "
            "`kinetoctl trace PID` traces any of them",
            err=True,
        )
    return code
