"""`kinetoctl ps`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from kinetoctl.base.common_options import CommonOptions, common_options, current
from kinetoctl.client import enum_names
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.selection import Selection
from kinetoctl.errors import NotFound
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.host_options import named_places, place_options
from kinetoctl.options.selection_options import selector_options
from kinetoctl.output.console import print_table, say
from kinetoctl.output.json_yaml import emit, plain

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

    from kinetoctl.client.fleet.host_client import HostClient
    from kinetoctl.client.hosts.host_targets import Place

Shown = tuple[list["pb.Process"], ExitCode]
COLUMNS = ("PID", "USER", "RANK", "GPU", "FRAMEWORK", "AGENT", "ITER")


def _show(processes: "Sequence[pb.Process]", settings: CommonOptions, hosts: Sequence[str] = ()) -> None:
    """Prints a table. hosts: the host of each process, if there are several."""
    pods = any(process.pod_name for process in processes)
    columns = (*(("HOST",) if hosts else ()), *COLUMNS, *(("POD",) if pods else ()), "COMMAND")
    rows = [
        (
            *hosts[at : at + 1],
            *_row(process),
            *((enum_names.pod(process) or "-",) if pods else ()),
            " ".join(process.command),
        )
        for at, process in enumerate(processes)
    ]
    print_table(columns, rows, color=settings.color)


def _row(process: "pb.Process") -> tuple[str, ...]:
    """The cells of COLUMNS."""
    return (
        str(process.pid),
        process.user or str(process.uid),
        str(process.rank) if process.HasField("rank") else "-",
        ",".join(map(str, process.gpus)) or "-",
        process.framework or "-",
        _agent(process),
        str(process.iterations) if process.iterations > 0 else "-",
    )


def _agent(process: "pb.Process") -> str:
    state = enum_names.agent_state(process.agent_state)
    if process.attached and state == "READY":
        return "ATTACHED"
    return state


def _of_hosts(places: "Sequence[Place]", selector: "pb.Selector", every: bool, settings: CommonOptions) -> Shown:
    """Prints the processes of many hosts, and reports hosts that do not answer. Raises their error if none answers."""
    from kinetoctl.client.fleet.broadcast import ask, errors, exit_code, values  # 60 ms that one host does not need

    async def processes(client: "HostClient", place: "Place") -> "list[pb.Process]":
        return await client.processes(place.selected(selector), include_without_agent=every)

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
        processes = client.processes(selector, include_without_agent=every)
    if settings.output == "table":
        _show(processes, settings)
    else:
        emit([plain(process) for process in processes], settings.output)
    return processes, ExitCode.DONE


@click.command("ps")
@click.option("--all", "include_without_agent", is_flag=True, help="Include Python and GPU processes without an agent.")
@selector_options
@place_options
@common_options
def command(include_without_agent: bool, selection: Selection, **hosts: Any) -> int:
    """List processes that can be traced.

    With options that select processes, it lists those that `kinetoctl trace` would record with the same options;
    without, every process that has an agent. --all adds launchers, DataLoader workers and processes without an
    agent.

    AGENT is READY (an agent is waiting), ATTACHED (READY, and `kinetoctl trace` attached it for a while), BUSY (a
    capture is running), INCOMPATIBLE (the agent has another version) or NONE (`kinetoctl trace` attaches one).
    ITER is the number of training iterations so far.
    """
    settings = current()
    places = named_places(hosts)
    selects = bool(selection) or any(place.selects for place in places)
    selector = (selection if selects else replace(selection, helpers=True)).to_proto()
    if places:
        processes, code = _of_hosts(places, selector, include_without_agent, settings)
    else:
        processes, code = _here(selector, include_without_agent, settings)
    if not processes and selects:
        raise NotFound("no process matches")
    if not processes and not settings.quiet:
        say(
            "no process has an agent; `kinetoctl ps --all` lists the others, and `kinetoctl trace --pid` attaches one",
            err=True,
        )
    return code
