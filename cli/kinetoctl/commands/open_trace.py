"""`kinetoctl open`: a trace in the Perfetto UI."""

import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
from kineto_trace.base.install_advice import install_advice

from kinetoctl.base.common_options import CommonOptions, common_options, current
from kinetoctl.base.perfetto_ui import HOST, PORT, UI_PACKAGE, Served, offline_ui, serving
from kinetoctl.errors import Refused, trace_errors, write_errors
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.trace_arguments import memory_bound, one_trace, open_context, trace_argument
from kinetoctl.output import units
from kinetoctl.output.console import say, wait_until_set

if TYPE_CHECKING:
    from kineto_trace.open.trace_discovery import Source

CONVERTED_FORMAT, CONVERTED_SUFFIX = "chrome", ".json.gz"  # what the UI opens soonest


@click.command("open")
@trace_argument("TRACE")
@click.option("--no-browser", is_flag=True, help="Print the address instead of opening a browser.")
@click.option(
    "--offline",
    is_flag=True,
    help="Use an installed copy of the UI instead of ui.perfetto.dev, without the internet.",
)
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65_535),
    help=f"Port on 127.0.0.1; ui.perfetto.dev can only use {PORT}.  [default: {PORT}; with --offline any free port]",
)
@common_options
def command(trace: str, no_browser: bool, offline: bool, port: int | None) -> int:
    """Show a trace in the Perfetto UI.

    The page loads the file from this machine into the browser; it is sent nowhere else. Files that the UI can read are
    served unchanged, others as Chrome JSON. The command ends once the file has been loaded; with --offline, on Ctrl-C.
    """
    settings = current()
    ui = offline_ui() if offline else None
    if offline and ui is None:
        raise Refused(f"--offline needs a copy of the UI: {install_advice(UI_PACKAGE)}")
    with one_trace(trace, settings, bounded=False) as source, _readable(source, settings) as file:
        served = Served(file, ui)
        wanted = port if port is not None else (0 if offline else PORT)
        try:
            with serving(served, wanted) as actual:
                _show(served, actual, no_browser=no_browser, settings=settings)
        except OSError as exc:
            raise Refused(
                f"port {wanted} on {HOST} cannot be used: {exc.strerror or exc}; "
                "stop the program that uses it, or use --offline"
            ) from exc
    return ExitCode.DONE


@contextmanager
def _readable(source: "Source", settings: CommonOptions) -> Iterator[Path]:
    """A file that the UI reads: the trace itself, or a temporary one made of it."""
    with trace_errors():
        from kineto_trace.open.trace_opener import Form, detect

        form = detect(source.path)
        if form in (Form.CHROME, Form.PERFETTO):
            yield source.path
            return
    with tempfile.TemporaryDirectory(prefix="kinetoctl-") as folder:
        path = Path(folder) / f"{source.path.resolve().name}{CONVERTED_SUFFIX}"
        if not settings.quiet:
            say(f"converting {source.path} to Chrome JSON", err=True)
        with trace_errors(), write_errors(path), memory_bound():
            from kineto_trace.formats.trace_export import export_trace

            export_trace(open_context(source).trace, path, CONVERTED_FORMAT)
        yield path


def _show(served: Served, port: int, *, no_browser: bool, settings: CommonOptions) -> None:
    address = served.address(port)
    started = not no_browser and webbrowser.open(address)
    if not started or not settings.quiet:
        say(address)
    if not settings.quiet:
        size = units.size(served.file.stat().st_size)
        until = "press Ctrl-C to stop" if served.ui else "stops once the file has been loaded, or on Ctrl-C"
        say(f"serving {served.file.name} ({size}) on {HOST}:{port}; {until}", err=True)
        if not served.ui:
            first = "" if offline_ui() else f"{install_advice(UI_PACKAGE)}, then "
            say(f"without the internet: {first}kinetoctl open --offline", err=True)
        if not started and not no_browser:
            say(f"no browser was found here: forward the port with `ssh -L {port}:{HOST}:{port} …`", err=True)
    if not served.ui:
        wait_until_set(served.fetched)
        return
    with suppress(KeyboardInterrupt):  # the page may be loaded again
        wait_until_set(threading.Event())
