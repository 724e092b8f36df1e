"""`kinetoctl ps`."""

from typing import Any

import click

from kinetoctl.base.common_options import common_options, current
from kinetoctl.client.selection import Selection
from kinetoctl.errors import NotFound
from kinetoctl.options.selection_options import named_places, place_options, selector_options
from kinetoctl.output.console import say
from kinetoctl.output.listing import PROCESSES, listing_options, show_list


@click.command("ps")
@click.option(
    "--all", "include_without_agent", is_flag=True, help="List every Python and GPU process, whether or not it trains."
)
@listing_options(PROCESSES.orders, "by pid, host by host")
@selector_options
@place_options
@common_options
def command(include_without_agent: bool, selection: Selection, watches: bool, **values: Any) -> int:
    """List processes that train or use a GPU, and whether they can be traced.

    It lists processes that have an agent, hold a context on a GPU or were started with KINETO_USE_DAEMON, and Python
    processes that have loaded torch, JAX, TensorFlow or CuPy, have a GPU open, show signs of a plug-in's accelerator,
    have a rank or belong to a job. Launchers and DataLoader workers are left out. --all lists every Python and GPU
    process. With options that select processes, it lists those that `kinetoctl trace` would record with the same
    options.

    TRACE: ready (an agent is waiting), attached (the same, but `kinetoctl trace` attached the agent for a while),
    attach (`kinetoctl trace` will attach one; no obstacle was seen), busy (a capture is running), or the reason why no
    trace is possible; `kinetoctl doctor PID` shows more. KINETO: "polls" if the process's own libkineto polls this
    daemon (as it would Dynolog); "traces" while it records. ITER: training iterations that the agent has counted;
    ITER/S: their current rate per second.
    """
    settings = current()
    places = named_places(values)
    selects = bool(selection) or any(place.selects for place in places)
    selector, wanted = selection.to_proto(), {"include_without_agent": include_without_agent, "trainers": True}
    entries, code = show_list(
        PROCESSES,
        places,
        settings,
        lambda client: client.processes(selector, **wanted),
        lambda client, place: client.processes(place.selected(selector), **wanted),
        lambda place: {"host": place.host},
        watches=watches,
        **values,
    )
    if watches:
        return code
    if not entries and selects:
        raise NotFound("no process matches")
    if not entries and not settings.quiet:
        say(
            "no process shows signs of training; `kinetoctl ps --all` lists every Python process, and "
            "`kinetoctl trace PID` traces any of them",
            err=True,
        )
    return code
