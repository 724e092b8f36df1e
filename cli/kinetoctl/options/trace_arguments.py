"""Traces that are named on the command line: files, folders, patterns, URLs, captures.

Theory of operation
    The trace library resolves arguments that are paths or patterns. Any other argument that looks like the id of a
    capture is looked up at the daemon: if its store is on this machine and may be read, the stored columns are used in
    place; otherwise the files are downloaded into a temporary folder and verified as by `captures fetch`. The trace
    library lists URLs of object stores; commands that cannot read from there get a temporary copy.

    The trace library is imported in functions only, so that commands which do not need it start at once.
"""

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem
from kineto_trace.store.output_formats import ATTACHMENTS

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.base.value_types import removable_folder
from kinetoctl.errors import NoSuchTrace, NotFound, trace_errors
from kinetoctl.output.console import say

if TYPE_CHECKING:
    from kineto_trace.model.context import Context
    from kineto_trace.open.trace_discovery import Source

F = TypeVar("F", bound=Callable[..., Any])
CAPTURE_ID = re.compile(r"\d{8}-\d{6}-[\w-]+")


def _complete(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from kinetoctl.options.completers import capture_ids  # only when a shell asks: it needs the daemon

    found = capture_ids(incomplete) if CAPTURE_ID.match(incomplete) else []
    return found or [CompletionItem(incomplete, type="file")]


# May be left out: the command checks whether it needs one.
traces_argument = click.argument("traces", metavar="[TRACE]...", nargs=-1, shell_complete=_complete)


def trace_argument(name: str) -> Callable[[F], F]:
    """Adds an argument that names one trace."""
    return click.argument(name.lower(), metavar=name, shell_complete=_complete)


@contextmanager
def found_traces(
    arguments: Sequence[str],
    settings: CommonOptions,
    *,
    fleet: str = "",
    captures: str = "latest",
    here: bool = True,
    bounded: bool = True,
) -> Iterator[list["Source"]]:
    """All traces that these arguments name, in the order of ranks. Downloaded files exist until the context ends.

    fleet: of captures at URLs, only the parts of this one. captures: which one of several captures of a process, see
    find_traces. here: whether to download traces from object stores too. bounded: whether this process, and programs
    that it starts, are held to the free memory until then.
    Raises NotFound, TraceUnreadable, and the client's errors for captures.
    """
    if not arguments:
        raise click.UsageError("name a trace: a file, a folder, a glob pattern, a URL or the id of a capture")
    with ExitStack() as stack, trace_errors():
        paths = trace_paths(arguments, settings, stack)
        from kineto_trace.open.trace_discovery import find_traces

        if bounded:
            stack.enter_context(memory_bound())
        sources = find_traces(*paths, fleet=fleet, captures=captures)
        yield _copied(sources, settings, stack) if here else sources


@contextmanager
def memory_bound() -> Iterator[None]:
    """Holds this process to the free memory while it reads files, which may be hostile."""
    from kineto_trace.base.quantities import held_to_free_memory

    # Arrow's own allocator reserves a gibibyte, which would count.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    with held_to_free_memory():
        yield


def trace_paths(arguments: Sequence[str], settings: CommonOptions, stack: ExitStack) -> list[str | Path]:
    """The paths, patterns and URLs that these arguments name. Downloaded files exist until the stack is closed.

    Raises NotFound and the client's errors for captures.
    """
    paths: list[str | Path] = []
    for text in arguments:
        paths += _paths(text, settings, stack)
    return paths


@contextmanager
def one_trace(argument: str, settings: CommonOptions, *, bounded: bool = True) -> Iterator["Source"]:
    """The one trace that this argument names; see found_traces. Raises UsageError if there are several."""
    with found_traces([argument], settings, captures="all", bounded=bounded) as sources:
        if len(sources) != 1:
            names = ", ".join(str(source.path) for source in sources[:3])
            raise click.UsageError(f"{argument} has {len(sources)} traces; name one of them: {names}")
        yield sources[0]


def open_context(source: "Source") -> "Context":
    """Opens the trace for analysis. Raises TraceUnreadable."""
    with trace_errors():
        from kineto_trace.model.context import Context
        from kineto_trace.open.trace_opener import open_trace

        return Context(open_trace(source.path), rank=source.rank)


def _copied(sources: list["Source"], settings: CommonOptions, stack: ExitStack) -> list["Source"]:
    """The traces, with those of object stores copied into a temporary folder. Raises FileError."""
    if all(source.remote is None for source in sources):
        return sources
    from kineto_trace.open.remote_traces import fetch

    folder = stack.enter_context(removable_folder(_FOLDER_PREFIX))
    copied = []
    for number, source in enumerate(sources):
        if source.remote is not None:
            if not settings.quiet:
                say(f"fetching {source.place}", err=True)
            own = folder / str(number)
            own.mkdir()
            source = replace(source, path=fetch(source.remote, own), remote=None)  # noqa: PLW2901
        copied.append(source)
    return copied


def _paths(text: str, settings: CommonOptions, stack: ExitStack) -> Sequence[str | Path]:
    from kineto_trace.store.object_stores import is_url

    if is_url(text):
        return [text]
    path = Path(text)
    if path.exists():
        return [path]
    if glob.has_magic(text):
        if not glob.glob(text, recursive=True):  # noqa: PTH207 - absolute patterns too
            raise NoSuchTrace(f"no file matches {text}")
        return [path]
    if CAPTURE_ID.fullmatch(text):
        return _capture(text, settings, stack)
    raise NoSuchTrace(f"there is no file {text}")


def _capture(capture_id: str, settings: CommonOptions, stack: ExitStack) -> list[Path]:
    from kinetoctl.client.daemon_client import Client  # files need no gRPC

    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        capture = client.capture(capture_id)
        folder = Path(client.host().store_path) / "captures" / capture_id / "targets"
        stored = _stored(folder)
        if stored:
            return stored
        fetched = stack.enter_context(removable_folder(_FOLDER_PREFIX))
        return fetch_trace(client, capture, settings, fetched)


def _stored(folder: Path) -> list[Path]:
    """The targets with columns in a store on this machine, if it may be read."""
    try:
        return sorted(entry for entry in folder.iterdir() if (entry / "columns" / "trace.json").is_file())
    except OSError:
        return []


def wanted_format(capture: Any) -> str:
    """The stored format from which the capture can be analysed elsewhere. Raises NotFound."""
    formats = {file.format for target in capture.targets for file in target.files}
    wanted = next((name for name in ("chrome", "chrome-json") if name in formats), None)
    if wanted is None and ATTACHMENTS["memory_snapshot"] in formats:
        raise NotFound(
            f"capture {capture.id} has no trace, only a memory snapshot: "
            f"`kinetoctl report --view snapshot_devices --view snapshot_stacks {capture.id}` shows it"
        )
    if wanted is None:
        raise NotFound(f"capture {capture.id} has no trace; `kinetoctl captures show {capture.id}` shows why")
    return wanted


def fetch_trace(client: Any, capture: Any, settings: CommonOptions, folder: Path) -> list[Path]:
    """Downloads the traces of a capture into the folder and verifies them. Raises NotFound and the client's errors."""
    return fetch_format(client, capture, settings, folder, wanted_format(capture))


def fetch_format(client: Any, capture: Any, settings: CommonOptions, folder: Path, wanted: str) -> list[Path]:
    """Downloads the files of this format and verifies them. Raises the client's errors."""
    from kinetoctl.client.tracing import Outcome, fetch_files
    from kinetoctl.output.capture_progress import show_progress

    outcome = Outcome(capture)
    with show_progress(quiet=settings.quiet, color=settings.color) as progress:
        fetch_files(client, outcome, folder, progress, file_format=wanted)
    if outcome.problems:
        raise outcome.problems[0]
    return sorted(outcome.paths.values())


# Memory snapshots that are named on the command line: files, folders, patterns, traces with one beside them,
# captures.
# The trace library is imported in functions only, so that commands which do not need it start at once.
SNAPSHOT_FORMAT = ATTACHMENTS["memory_snapshot"]
_FOLDER_PREFIX = "kinetoctl-"


def all_snapshots(arguments: Sequence[str]) -> bool:
    """Whether all of these arguments are files that may be snapshots."""
    from kineto_trace.snapshots.snapshot_reader import is_snapshot_file

    paths = [Path(match) for text in arguments for match in glob.glob(text, recursive=True) or [text]]  # noqa: PTH207 - absolute patterns too
    return bool(paths) and all(map(is_snapshot_file, paths))


def snapshot_paths(arguments: Sequence[str], settings: CommonOptions, stack: ExitStack) -> list[Path]:
    """The snapshots that these arguments name. Downloaded files exist until the stack is closed.

    Raises NotFound and the client's errors for captures.
    """
    from kineto_trace.snapshots.snapshot_reader import snapshots_at

    found: list[Path] = []
    for text in arguments:
        if not Path(text).exists() and CAPTURE_ID.fullmatch(text):
            found += _of_capture(text, settings, stack)
            continue
        here = snapshots_at(text)
        if not here:
            raise NoSuchTrace(f"there is no memory snapshot at {text}")
        found += here
    return list(dict.fromkeys(found))


def has_snapshot(capture: Any) -> bool:
    """Whether a capture has a memory snapshot."""
    return any(file.format == SNAPSHOT_FORMAT for target in capture.targets for file in target.files)


def fetch_snapshots(client: Any, capture: Any, settings: CommonOptions, folder: Path) -> list[Path]:
    """Downloads the snapshots of a capture and verifies them. Raises NotFound and the client's errors."""
    if not has_snapshot(capture):
        raise NotFound(
            f"capture {capture.id} has no memory snapshot: `kinetoctl memory` takes one, and so does "
            "`kinetoctl trace --activities kernel,memory_snapshot`"
        )
    return fetch_format(client, capture, settings, folder, SNAPSHOT_FORMAT)


def _of_capture(capture_id: str, settings: CommonOptions, stack: ExitStack) -> list[Path]:
    from kinetoctl.client.daemon_client import Client  # files need no gRPC

    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        capture = client.capture(capture_id)
        folder = stack.enter_context(removable_folder(_FOLDER_PREFIX))
        return fetch_snapshots(client, capture, settings, folder)
