"""`kinetoctl web`: the web page."""

import glob
import webbrowser
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import click

from kinetoctl.base.common_options import common_options, current
from kinetoctl.base.value_types import DURATION, SIZE
from kinetoctl.errors import NoSuchTrace, Refused
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.trace_arguments import traces_argument
from kinetoctl.output.console import say

MIN_MEMORY_BYTES = 512 << 20


def _files(arguments: Sequence[str]) -> list[str]:
    """The arguments, each of which names files here. Raises NoSuchTrace."""
    for text in arguments:
        if not Path(text).exists() and not glob.glob(text, recursive=True):  # noqa: PTH207 - absolute patterns too
            raise NoSuchTrace(f"there is no file {text}")
    return list(dict.fromkeys(arguments))


@click.command("web")
@traces_argument
@click.option("--no-browser", is_flag=True, help="Print the address and start no browser.")
@click.option(
    "--port", metavar="N", type=click.IntRange(0, 65_535), default=0, help="Port on 127.0.0.1.  [default: any free one]"
)
@click.option(
    "--worker-memory",
    type=SIZE,
    default="4GiB",
    help="Memory that each of the two processes that analyse traces may use.  [default: 4GiB]",
)
@click.option(
    "--worker-time",
    type=DURATION,
    default="60s",
    help="Time that one analysis may take before it is ended.  [default: 60s]",
)
@common_options
def command(traces: tuple[str, ...], no_browser: bool, port: int, worker_memory: int, worker_time: int) -> int:
    """Show captures, processes and traces in the browser.

    \b
    kinetoctl web                                captures of the daemon
    kinetoctl web trace.json.gz other.json.gz    these files, without a daemon

    The page runs on this machine as you, until Ctrl-C. It asks the daemon with your rights. Only your own programs can
    connect to it, and the address works for one browser, once; the terminal then prints the next one. Nothing is
    loaded from the internet.

    Each TRACE is a file, a folder or a glob pattern; the traces of a folder or pattern are taken as the ranks of a job.
    """
    from kinetoctl.client.daemon_client import Client  # with the rest of what only the server needs
    from kinetoctl.web.analyses.analysis_queue import AnalysisQueue
    from kinetoctl.web.analyses.trace_library import TraceLibrary
    from kinetoctl.web.analyses.worker_process import WorkerLimits
    from kinetoctl.web.application import WebApplication
    from kinetoctl.web.http.request_handler import RequestHandler
    from kinetoctl.web.http.sessions import Sessions
    from kinetoctl.web.http.web_server import HOST, WebServer
    from kinetoctl.web.pages.page_context import PageContext

    settings, sessions = current(), Sessions()
    limits = WorkerLimits(memory_bytes=max(worker_memory, MIN_MEMORY_BYTES), job_s=max(1, worker_time // 10**9))
    library = TraceLibrary(settings, _files(traces))
    with closing(library), AnalysisQueue(limits) as queue:
        context = PageContext(
            settings=settings,
            library=library,
            queue=queue,
            connect=lambda: Client(settings.address, timeout_s=settings.timeout_s),
        )

        def address() -> str:
            return f"http://{HOST}:{server.port}/#{sessions.token}"

        application = WebApplication(
            context, sessions, on_entry=lambda: say(f"for another browser: {address()}", err=True)
        )
        try:
            server = WebServer(partial(RequestHandler, application), port)
        except OSError as exc:
            raise Refused(f"port {port} on {HOST} cannot be used: {exc.strerror or exc}") from exc
        with server:
            if no_browser or not webbrowser.open(address()):
                say(address())
            if not settings.quiet:
                say(f"serving on {HOST}:{server.port}; Ctrl-C ends it", err=True)
            try:
                server.serve()
            except KeyboardInterrupt:
                return ExitCode.DONE
    return ExitCode.DONE
