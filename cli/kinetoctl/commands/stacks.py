"""`kinetoctl stacks`."""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click
from kineto_protos.v1 import profiler_pb2 as pb

from kinetoctl.base.common_options import CommonOptions, common_options, current
from kinetoctl.base.own_daemon import command_of_root, has_only_our_rights, reachable_daemon
from kinetoctl.client.selection import Selection
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.selection_options import named_places, place_options, required, selector_options
from kinetoctl.output.console import emit, emit_one_of_many, say
from kinetoctl.output.listing import interval_option
from kinetoctl.output.stack_groups import ReadProcess
from kinetoctl.output.stack_page import StackLook, StandingTimes, document, look_of, page
from kinetoctl.output.units import moment

if TYPE_CHECKING:
    from kinetoctl.client.host_targets import Place

_CAPABILITY = "CAP_SYS_PTRACE"  # in the reason why a daemon without it could not read a process


def _of_hosts(places: "Sequence[Place]", selector: pb.Selector, timeout_s: float) -> StackLook:
    """Raises NotFound if no process matches, and the first host's error if none answers."""
    from kinetoctl.client.fleet.host_client import ask  # 60 ms that one host does not need

    return look_of(ask(places, lambda client, place: client.stacks(place.selected(selector)), timeout_s=timeout_s))


def _print(look: StackLook, times: StandingTimes, settings: CommonOptions, *, all_threads: bool) -> None:
    bold = sys.stdout.isatty() and settings.color
    for line in page(look, times.of, wide=settings.wide, all_threads=all_threads):
        bold = bold and bool(line)
        say(line, bold=bold)


def _watch(load: Callable[[], StackLook], settings: CommonOptions, interval_s: float, *, all_threads: bool) -> None:
    """Shows a look every interval_s seconds until Ctrl-C."""
    times = StandingTimes()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            look = load()
            times = times.after(look)
            if settings.output == "table":
                if sys.stdout.isatty():
                    click.clear()
                say(moment(time.time_ns()))
                _print(look, times, settings, all_threads=all_threads)
                say("")
            else:
                emit_one_of_many(document(look, times.of), settings.output)
            time.sleep(interval_s)


@click.command("stacks")
@click.option("--all-threads", is_flag=True, help="Show idle threads too: those that wait for work in library code.")
@click.option("--watch", "-w", "watches", is_flag=True, help="Keep looking until Ctrl-C.")
@interval_option("5s", "With --watch: time between looks.")
@selector_options
@place_options
@common_options
def command(all_threads: bool, watches: bool, interval: int, selection: Selection, **hosts: Any) -> int:
    """Show where each rank of a job is, and which one the others are waiting for.

    \b
    kinetoctl stacks 1234
    kinetoctl stacks --rank all
    kinetoctl stacks --hosts @nodes --rank all --watch

    The stacks are read from outside: nothing is injected into the processes, and no thread is stopped. The first line
    sums up what they mean. Processes whose main threads are in the same place form a group; the smallest comes first.
    A single look cannot tell a hang from a short wait; with --watch, each group shows how long it has been seen there.

    The exit code is 3 if no process matches, and 4 if some process or host could not be read.
    """
    settings = current()
    places = named_places(hosts)
    if not (places and all(place.selects for place in places)):
        required(selection)
    selector = selection.to_proto()
    with contextlib.ExitStack() as stack:
        client = None if places else stack.enter_context(reachable_daemon(settings, say))

        def load() -> StackLook:
            if client is None:
                return _of_hosts(places, selector, settings.timeout_s)
            stacks, error = client.stacks(selector)
            return StackLook(
                processes=[ReadProcess(stacks=each) for each in stacks],
                failures=[] if error is None else [("", str(error))],
            )

        if watches:
            _watch(load, settings, interval / 1e9, all_threads=all_threads)
            return ExitCode.DONE
        look = load()
        denied = any(_CAPABILITY in each.stacks.reason for each in look.processes)
        needs_root = denied and client is not None and has_only_our_rights(client)
    times = StandingTimes().after(look)
    if settings.output == "table":
        _print(look, times, settings, all_threads=all_threads)
    else:
        emit(document(look, times.of), settings.output)
    if needs_root:
        say(f"Root can read it: {command_of_root()}", err=True)
    return ExitCode.DONE if look.complete else ExitCode.PARTIAL
