"""`kinetoctl top`."""

import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from kinetoctl.base.common_options import CommonOptions, common_options, current
from kinetoctl.base.own_daemon import reachable_daemon
from kinetoctl.client.daemon_client import kept_open
from kinetoctl.client.selection import Selection
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.capture_spec import DEFAULT_DURATION_NS
from kinetoctl.options.selection_options import selector_options
from kinetoctl.output.console import captured, emit, emit_one_of_many, plain, rich_console, say, say_text
from kinetoctl.output.listing import interval_option
from kinetoctl.output.top_live import LiveView, can_show
from kinetoctl.output.top_view import ORDERS, TopView, ordered, render

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb


def _default_spec(pid: int) -> "pb.CaptureSpec":
    """What `kinetoctl trace PID` requests."""
    from kineto_protos.v1 import profiler_pb2 as pb

    return pb.CaptureSpec(
        selector=Selection(pids=(pid,)).to_proto(), duration_ns=DEFAULT_DURATION_NS, options=pb.Options()
    )


def _print(sample: "pb.HostSample", *, order: str, reverse: bool, settings: CommonOptions) -> None:
    if sys.stdout.isatty() and not settings.wide:
        console = rich_console(sys.stdout, no_color=not settings.color)
        console.print(render(sample, order=order, reverse=reverse, width=console.width))
        return
    say_text("\n".join(captured(render(sample, order=order, reverse=reverse))))


def _document(sample: "pb.HostSample", *, order: str, reverse: bool) -> dict[str, Any]:
    document = plain(sample)
    document["processes"] = [plain(each) for each in ordered(sample.processes, order, reverse=reverse)]
    return document


@click.command("top")
@interval_option("2s", "Time between samples.")
@click.option(
    "--sort",
    "order",
    type=click.Choice(tuple(ORDERS)),
    default="gpu",
    show_default=True,
    help="Sort order of the processes.",
)
@click.option("--reverse", is_flag=True, help="Reverse the sort order.")
@click.option("--once", is_flag=True, help="Print one sample and exit, instead of showing a live view.")
@click.option(
    "--all",
    "include_without_agent",
    is_flag=True,
    help="Include Python processes that have no agent, use no GPU and do not train.",
)
@selector_options
@common_options
def command(
    interval: int, order: str, reverse: bool, once: bool, include_without_agent: bool, selection: Selection
) -> int:
    """Show the host, its GPUs and the processes that train or use a GPU, live.

    UTIL is the share of time during which a kernel ran, MEM the share during which GPU memory was accessed. CPU
    150% means one and a half CPUs. Ctrl-C exits. In a pipe, or with -o json or yaml, samples are printed one after
    the other (one per line in JSON).
    """
    settings = current()
    with reachable_daemon(settings, say) as client:
        samples = partial(
            kept_open,
            lambda: client.watch_host(
                selection.to_proto(), interval_ns=interval, include_without_agent=include_without_agent
            ),
        )
        if settings.output == "table" and not once and can_show():
            view = TopView(order=order, reverse=reverse)
            LiveView(client, samples, view, spec=_default_spec, color=settings.color).run()
            return ExitCode.DONE
        for sample in samples():
            if settings.output == "table":
                _print(sample, order=order, reverse=reverse, settings=settings)
            elif once:
                emit(_document(sample, order=order, reverse=reverse), settings.output)
            else:
                emit_one_of_many(_document(sample, order=order, reverse=reverse), settings.output)
            if once:
                break
    return ExitCode.DONE
