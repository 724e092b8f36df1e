"""`kinetoctl web`: the web page."""

import glob
import re
import threading
import webbrowser
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import click
from kineto_protos.options import Parsed

from kinetoctl.base.common_options import CommonOptions, common_options, current
from kinetoctl.base.value_types import DURATION, SIZE
from kinetoctl.errors import NoSuchTrace
from kinetoctl.exit_codes import ExitCode
from kinetoctl.options.trace_arguments import traces_argument
from kinetoctl.output.console import say, wait_until_set

HOST = "127.0.0.1"
MIN_MEMORY_BYTES = 512 << 20
NS_PER_S = 10**9
EDITORS: Mapping[str, str] = {
    "vscode": "vscode://file{path}:{line}",
    "cursor": "cursor://file{path}:{line}",
    "pycharm": "pycharm://open?file={path}&line={line}",
}
_TEMPLATE = re.compile(r"[a-z][a-z0-9+.-]*:[\x21-\x7e]+")
_ACTS = ("javascript:", "data:", "vbscript:", "blob:", "about:")  # on the page itself


def parse_editor(text: str) -> str:
    """The template of an editor. Raises ValueError."""
    if text in EDITORS:
        return EDITORS[text]
    if not _TEMPLATE.fullmatch(text) or text.startswith(_ACTS) or "{path}" not in text or "{line}" not in text:
        names = ", ".join(EDITORS)
        raise ValueError(f"expected {names}, or a URL with {{path}} and {{line}}, got {text!r}")
    return text


def _files(arguments: Sequence[str]) -> list[str]:
    """The arguments, each an existing path, a folder to watch or a URL. Raises NoSuchTrace."""
    from kineto_trace.store.object_stores import is_url

    for text in arguments:
        if not is_url(text) and not _may_match(text):
            raise NoSuchTrace(f"there is no file {text}")
    return list(dict.fromkeys(arguments))


def _may_match(text: str) -> bool:
    """Whether there is such a file or folder, or a folder in which files may match this pattern."""
    if Path(text).exists() or not glob.has_magic(text):
        return Path(text).exists()
    parts = Path(text).parts
    fixed = parts[: next(at for at, part in enumerate(parts) if glob.has_magic(part))]
    return Path(*fixed).is_dir()


@click.command("web")
@traces_argument
@click.option("--no-browser", is_flag=True, help="Print the address instead of opening a browser.")
@click.option(
    "--port",
    metavar="N",
    type=click.IntRange(0, 65_535),
    default=0,
    help="Port on 127.0.0.1.  [default: any free port]",
)
@click.option(
    "--worker-memory",
    type=SIZE,
    default="4GiB",
    help="Memory limit of each of the two processes that analyse traces.  [default: 4GiB]",
)
@click.option(
    "--worker-time",
    type=DURATION,
    default="60s",
    help="Time limit for one analysis.  [default: 60s]",
)
@click.option(
    "--url-space",
    type=SIZE,
    default="8GiB",
    help="Disk space for local copies of traces from URLs.  [default: 8GiB]",
)
@click.option(
    "--editor",
    metavar="NAME",
    type=Parsed("editor", parse_editor),
    help="Link source lines to this editor: vscode, cursor, pycharm, or a URL with {path} and {line}.",
)
@common_options
def command(
    traces: tuple[str, ...],
    no_browser: bool,
    port: int,
    worker_memory: int,
    worker_time: int,
    url_space: int,
    editor: str | None,
) -> int:
    """Show captures, processes and traces in the browser.

    \b
    kinetoctl web                                captures of the daemon
    kinetoctl web trace.json.gz other.json.gz    these files, without a daemon
    kinetoctl web runs/                          the traces below a folder, including new ones
    kinetoctl web s3://bucket/prefix             copies of the traces there

    The server runs on this machine under your account, until Ctrl-C, and uses the daemon with your permissions. Only
    your own programs can connect to it. The address works once, for one browser; the terminal then prints the next
    one. Nothing is loaded from the internet.

    Each TRACE is a file, a folder, a glob pattern or a URL, as for `kinetoctl report`. The ranks of a job are one entry
    in the list, and so is each run in a TensorBoard log folder. The list is kept up to date.
    """
    from kinetoctl.web.analyses.analysis_queue import WorkerLimits  # with the rest of what only the server needs
    from kinetoctl.web.application import WebOptions, running_web

    settings = current()
    limits = WorkerLimits(memory_bytes=max(worker_memory, MIN_MEMORY_BYTES), job_s=max(1, worker_time // NS_PER_S))
    options = WebOptions(traces=_files(traces), url_space=url_space, port=port, editor=editor or "", limits=limits)
    with running_web(options, settings, on_entry=partial(_tell_next, settings)) as web:
        if no_browser or not webbrowser.open(web.address):
            say(web.address)
        if not settings.quiet:
            say(f"serving on port {web.pages.port} of {HOST}; press Ctrl-C to stop", err=True)
        with suppress(KeyboardInterrupt):
            wait_until_set(threading.Event())
    return ExitCode.DONE


def _tell_next(settings: CommonOptions, address: str) -> None:
    if not settings.quiet:
        say(f"for another browser: {address}", err=True)
