"""Lists of processes or captures: columns, orders, one row each, printed once or whenever something has changed.

Theory of operation
    What kind of list it is, is a value (`ListKind`); commands give entries of it. A watch asks for the entries again
    and again: a terminal shows the whole table, redrawn, and keeps the last one; elsewhere an entry is a line when it
    comes, changes or goes. Figures that change all the time, such as an age, are no change.
"""

import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click
from kineto_trace.base.quantities import format_duration, format_number, shortened

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.base.own_daemon import reachable_daemon
from kinetoctl.base.value_types import DURATION
from kinetoctl.client import enum_names
from kinetoctl.client.daemon_client import Client
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output import units
from kinetoctl.output.console import (
    GAP,
    as_json,
    as_yaml,
    emit,
    plain,
    print_table,
    rich_console,
    say,
    say_text,
    table_lines,
)
from kinetoctl.output.units import NOTHING

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

    from kinetoctl.client.fleet.host_client import HostClient
    from kinetoctl.client.host_targets import Place

CHANGE = "CHANGE"
ADDED, CHANGED, GONE = "added", "changed", "gone"
F = TypeVar("F", bound=Callable[..., Any])
MAX_CAUSE = 72  # characters
LEAST_INTERVAL_NS = 500_000_000
MOST_INTERVAL_NS = 3600 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class ListColumn:
    """A column. wide: only with -o wide; optional: only if an entry has a value; moves: it changes all the time."""

    title: str
    cell: Callable[[Any], str]
    wide: bool = False
    optional: bool = False
    moves: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListKind:
    """A kind of list.

    key: what tells an item from others of its host, whatever its state. document: the item for JSON. orders: what
    --sort names: the key, and whether the largest comes first.
    """

    columns: Sequence[ListColumn]
    key: Callable[[Any], tuple[Any, ...]]
    document: Callable[[Any], dict[str, Any]]
    orders: Mapping[str, tuple[Callable[[Any], Any], bool]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One item. host: its name, if there are several hosts; place: what JSON says of the host."""

    item: Any
    host: str = ""
    place: Mapping[str, str]


Found = tuple[list[Entry], ExitCode]


def ordered(entries: Sequence[Entry], kind: ListKind, order: str | None, *, reverse: bool) -> list[Entry]:
    """The entries by one of kind.orders, or as they came; those that are equal stay as they came."""
    if order is None:
        return list(reversed(entries)) if reverse else list(entries)
    key, largest_first = kind.orders[order]
    return sorted(entries, key=lambda entry: key(entry.item), reverse=largest_first is not reverse)


def show(entries: Sequence[Entry], kind: ListKind, settings: CommonOptions) -> None:
    """Prints the entries once, in the format of --output."""
    if settings.output == "table":
        print_table(*_table(entries, kind, settings), color=settings.color)
    else:
        emit([_document(entry, kind) for entry in entries], settings.output)


def watch(load: Callable[[], Sequence[Entry]], kind: ListKind, settings: CommonOptions, interval_s: float) -> None:
    """Shows the entries again every interval_s seconds, or what has changed, until Ctrl-C."""
    if settings.output == "table" and sys.stdout.isatty():
        _redraw(load, kind, settings, interval_s)
        return
    with contextlib.suppress(KeyboardInterrupt):  # how one ends it
        known: dict[tuple[Any, ...], Entry] = {}
        first = True
        while True:
            entries = load()
            found = {_key(entry, kind): entry for entry in entries}
            changes = list(_changes(known, found, kind))
            _print_changes(changes, kind, settings, heading=first)
            known, first = found, first and not changes
            time.sleep(interval_s)


def _redraw(load: Callable[[], Sequence[Entry]], kind: ListKind, settings: CommonOptions, interval_s: float) -> None:
    from rich.live import Live
    from rich.text import Text

    console = rich_console(sys.stdout, no_color=not settings.color)
    entries: Sequence[Entry] = ()
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        while True:
            entries = load()
            columns, rows = _table(entries, kind, settings)
            lines = table_lines(columns, rows, console.size.width)
            live.update(Text("\n".join(lines), no_wrap=True), refresh=True)
            time.sleep(interval_s)
    show(entries, kind, settings)


def _key(entry: Entry, kind: ListKind) -> tuple[Any, ...]:
    return entry.host, *kind.key(entry.item)


def _changes(
    known: Mapping[tuple[Any, ...], Entry], found: Mapping[tuple[Any, ...], Entry], kind: ListKind
) -> Iterator[tuple[str, Entry]]:
    for key, entry in found.items():
        before = known.get(key)
        if before is None:
            yield ADDED, entry
        elif _steady(before, kind) != _steady(entry, kind):
            yield CHANGED, entry
    for key, entry in known.items():
        if key not in found:
            yield GONE, entry


def _steady(entry: Entry, kind: ListKind) -> list[str]:
    return [column.cell(entry.item) for column in kind.columns if not column.moves]


def _print_changes(
    changes: Sequence[tuple[str, Entry]], kind: ListKind, settings: CommonOptions, *, heading: bool
) -> None:
    if settings.output == "json":
        for change, entry in changes:
            say_text(as_json({"change": change, **_document(entry, kind)}))
        return
    if settings.output == "yaml":
        for change, entry in changes:
            say_text(f"---\n{as_yaml({'change': change, **_document(entry, kind)})}", nl=False)
        return
    columns = [column for column in kind.columns if settings.wide or not column.wide]
    if heading and changes:
        host = ["HOST"] if changes[0][1].host else []
        say(GAP.join([CHANGE, *host, *(column.title for column in columns)]))
    for change, entry in changes:
        say(GAP.join([change, *([entry.host] if entry.host else ()), *(column.cell(entry.item) for column in columns)]))


def _document(entry: Entry, kind: ListKind) -> dict[str, Any]:
    return {**entry.place, **kind.document(entry.item)}


def _table(entries: Sequence[Entry], kind: ListKind, settings: CommonOptions) -> tuple[list[str], list[list[str]]]:
    """Titles and rows."""
    shown = [
        (column.title, cells)
        for column, cells in shown_columns([entry.item for entry in entries], kind, wide=settings.wide)
    ]
    if any(entry.host for entry in entries):
        shown.insert(0, ("HOST", [entry.host for entry in entries]))
    return [title for title, _ in shown], [list(row) for row in zip(*(cells for _, cells in shown), strict=True)]


def shown_columns(items: Sequence[Any], kind: ListKind, *, wide: bool) -> list[tuple[ListColumn, list[str]]]:
    """The columns of a list of these items, each with its cells. wide: all of them, as with -o wide."""
    cells = [(column, [column.cell(item) for item in items]) for column in kind.columns if wide or not column.wide]
    return [
        (column, values) for column, values in cells if not column.optional or any(value != NOTHING for value in values)
    ]


def in_bounds(_ctx: click.Context, param: click.Parameter, value: int) -> int:
    """Click's hook: an interval between two looks."""
    if not LEAST_INTERVAL_NS <= value <= MOST_INTERVAL_NS:
        raise click.BadParameter("must be between 500ms and 1h", param=param)
    return value


def interval_option(default: str, meaning: str) -> Callable[[F], F]:
    """Adds --interval."""
    return click.option(
        "--interval", type=DURATION, default=default, show_default=True, callback=in_bounds, help=meaning
    )


def listing_options(orders: Iterable[str], usual: str) -> Callable[[F], F]:
    """Adds --sort, --reverse, --watch and --interval. usual: the order without --sort, for people."""

    def added(function: F) -> F:
        for option in reversed(
            (
                click.option(
                    "--sort", "order", type=click.Choice(tuple(orders)), help=f"Sort order.  [default: {usual}]"
                ),
                click.option("--reverse", is_flag=True, help="Reverse the order."),
                click.option(
                    "--watch",
                    "-w",
                    "watches",
                    is_flag=True,
                    help="Keep the list up to date until Ctrl-C; in a pipe, print a line for each change.",
                ),
                interval_option("2s", "Time between updates with --watch."),
            )
        ):
            function = option(function)
        return function

    return added


def show_list(
    kind: ListKind,
    places: "Sequence[Place]",
    settings: CommonOptions,
    here: Callable[[Client], Iterable[Any]],
    there: "Callable[[HostClient, Place], Awaitable[Sequence[Any]]]",
    told: "Callable[[Place], Mapping[str, str]]",
    *,
    order: str | None,
    reverse: bool,
    watches: bool,
    interval: int,
) -> Found:
    """Shows the items of the daemon (here), or, where there are places, of these hosts (there); returns them.

    told: what JSON says of a host. The others are those of listing_options; with `watches` there is nothing to return.
    Reports hosts that do not answer, and raises their error if none answers.
    """
    with contextlib.ExitStack() as stack:
        client = None if places else stack.enter_context(_client(kind, settings))

        def find() -> Found:
            if client is None:
                return _of_hosts(places, there, told, settings.timeout_s)
            return [Entry(item=item, place={}) for item in here(client)], ExitCode.DONE

        if watches:
            watch(lambda: ordered(find()[0], kind, order, reverse=reverse), kind, settings, interval / 1e9)
            return [], ExitCode.DONE
        entries, code = find()
    show(ordered(entries, kind, order, reverse=reverse), kind, settings)
    return entries, code


def _client(kind: ListKind, settings: CommonOptions) -> contextlib.AbstractContextManager[Client]:
    if kind is PROCESSES:  # a daemon that starts now has nothing else to list
        return reachable_daemon(settings, say)
    return Client(settings.address, timeout_s=settings.timeout_s)


def _of_hosts(
    places: "Sequence[Place]",
    load: "Callable[[HostClient, Place], Awaitable[Sequence[Any]]]",
    told: "Callable[[Place], Mapping[str, str]]",
    timeout_s: float,
) -> Found:
    from kinetoctl.client.fleet.host_client import ask, errors, exit_code, values  # 60 ms that one host does not need

    answers = ask(places, load, timeout_s=timeout_s)
    for text in errors(answers):
        say(text, err=True)
    entries = [
        Entry(item=item, host=place.host, place=told(place)) for place, of_host in values(answers) for item in of_host
    ]
    return entries, exit_code(answers)


# Processes as `kinetoctl ps` lists them: one row each. Pure.
OTHER_VERSION = "agent of another version"


def traceable(process: "pb.Process") -> str:
    """How a capture would reach it, or why none would."""
    state = enum_names.agent_state(process.agent_state)
    if process.HasField("standing"):
        return f"no: inside {process.standing.call}"
    if process.obstacle or state == "INCOMPATIBLE":
        return f"no: {process.obstacle or OTHER_VERSION}"
    if state == "BUSY":
        return "busy"
    if state == "READY":
        return "attached" if process.attached else "ready"
    return "attach"


def rate(process: "pb.Process") -> str:
    """Iterations per second, or for how long there has been none."""
    if process.stalled_ns > 0:
        return f"none for {format_duration(process.stalled_ns)}"
    return format_number(1e9 / process.iteration_ns) if process.iteration_ns > 0 else NOTHING


def _agent(process: "pb.Process") -> str:
    """The state of the agent; KINETO where there is none, but a libkineto that polls."""
    state = enum_names.agent_state(process.agent_state)
    return "KINETO" if state == "NONE" and process.HasField("kineto") else state


def _libkineto(process: "pb.Process") -> str:
    if not process.HasField("kineto"):
        return NOTHING
    return "traces" if process.kineto.tracing else "polls"


def _rank(process: "pb.Process") -> str:
    return str(process.rank) if process.HasField("rank") else NOTHING


_STATES = {
    "WAITING": "to upload",
    "RUNNING": "uploading",
    "RETRYING": "upload failing",
    "UPLOADED": "uploaded",
}
PROCESS_COLUMNS = (
    ListColumn(title="PID", cell=lambda each: str(each.pid)),
    ListColumn(title="USER", cell=lambda each: each.user or str(each.uid)),
    ListColumn(title="JOB", cell=lambda each: each.job_id or NOTHING, optional=True),
    ListColumn(title="RANK", cell=_rank),
    ListColumn(
        title="WORLD", cell=lambda each: str(each.world_size) if each.HasField("world_size") else NOTHING, wide=True
    ),
    ListColumn(title="GPU", cell=lambda each: ",".join(map(str, each.gpus)) or NOTHING),
    ListColumn(title="AGE", cell=lambda each: units.age(each.start_time_ns), moves=True),
    ListColumn(title="STARTED", cell=lambda each: units.moment(each.start_time_ns), wide=True),
    ListColumn(title="ITER", cell=lambda each: str(each.iterations) if each.iterations > 0 else NOTHING, moves=True),
    ListColumn(title="ITER/S", cell=rate, optional=True, moves=True),
    ListColumn(title="PARENT", cell=lambda each: str(each.parent_pid or NOTHING)),
    ListColumn(title="TRACE", cell=traceable),
    ListColumn(title="KINETO", cell=_libkineto, optional=True),
    ListColumn(title="FRAMEWORK", cell=lambda each: each.framework or NOTHING, wide=True),
    ListColumn(title="PYTHON", cell=lambda each: each.python_version or NOTHING, wide=True),
    ListColumn(title="AGENT", cell=_agent, wide=True),
    ListColumn(title="CONTAINER", cell=lambda each: each.container_id[:12] or NOTHING, wide=True, optional=True),
    ListColumn(title="POD", cell=lambda each: enum_names.pod(each) or NOTHING, optional=True),
    ListColumn(title="COMMAND", cell=lambda each: " ".join(each.command)),
)
PROCESSES = ListKind(
    columns=PROCESS_COLUMNS,
    key=lambda each: (each.pid, each.start_time_ns),
    document=plain,
    orders={
        "pid": (lambda each: each.pid, False),
        "age": (lambda each: each.start_time_ns, False),  # the oldest first
        "user": (lambda each: (each.user, each.pid), False),
        "job": (lambda each: (each.job_id == "", each.job_id, each.rank, each.pid), False),
        "rank": (lambda each: (not each.HasField("rank"), each.rank, each.pid), False),
        "gpu": (lambda each: (not each.gpus, list(each.gpus), each.pid), False),
        "iterations": (lambda each: each.iterations, True),
        "pace": (lambda each: 1 / each.iteration_ns if each.iteration_ns else 0.0, True),
    },
)


# Captures as `kinetoctl captures list` lists them: one row each. Pure.
def _first(values: Sequence[str]) -> str:
    """The first value, and how many more there are."""
    more = f" (+{len(values) - 1:,})" if len(values) > 1 else ""
    return f"{values[0]}{more}" if values else NOTHING


def stored(capture: "pb.Capture") -> int:
    """Bytes of its files."""
    return sum(file.size_bytes for target in capture.targets for file in target.files)


def _jobs(capture: "pb.Capture") -> list[str]:
    return sorted({target.process.job_id for target in capture.targets if target.process.job_id})


def _cause(capture: "pb.Capture") -> str:
    return shortened(capture.answer.cause, MAX_CAUSE) or NOTHING


def _labels(capture: "pb.Capture") -> str:
    return ",".join(f"{key}={capture.spec.labels[key]}" for key in sorted(capture.spec.labels)) or NOTHING


def commands(capture: "pb.Capture") -> list[str]:
    """The command lines of its processes, each once."""
    return list(dict.fromkeys(" ".join(target.process.command) for target in capture.targets))


def iso_utc(unix_ns: int) -> str | None:
    """A date and time in UTC to the second; None for 0."""
    return datetime.fromtimestamp(unix_ns // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if unix_ns else None


def iso_local(unix_ns: int) -> str | None:
    """A local date and time to the second, with its offset; None for 0."""
    return datetime.fromtimestamp(unix_ns // 10**9, UTC).astimezone().isoformat() if unix_ns else None


def document(capture: "pb.Capture") -> dict[str, Any]:
    """The capture for JSON, with its times as texts."""
    times = {
        f"{name}_{zone}": text(getattr(capture, f"{name}_ns"))
        for name in ("created", "ended")
        for zone, text in (("local", iso_local), ("utc", iso_utc))
    }
    return {**plain(capture), **times}


def where(capture: "pb.Capture") -> str:
    """In a few words: `local`, `uploaded`, `local, uploading, pinned`."""
    here = not capture.HasField("local_bytes") or capture.local_bytes > 0
    parts = ["local"] if here and any(target.files for target in capture.targets) else []
    if capture.HasField("upload"):
        state = enum_names.upload_state(capture.upload.state)
        parts.append(_STATES.get(state, state))
    if capture.pinned:
        parts.append("pinned")
    if any(file.damage for target in capture.targets for file in target.files):
        parts.append("damaged")
    return ", ".join(parts) or "-"


CAPTURE_COLUMNS = (
    ListColumn(title="ID", cell=lambda each: each.id),
    ListColumn(title="STATUS", cell=lambda each: enum_names.capture_status(each.status)),
    ListColumn(title="AGE", cell=lambda each: units.age(each.created_ns), moves=True),
    ListColumn(title="CREATED", cell=lambda each: iso_local(each.created_ns) or NOTHING, wide=True),
    ListColumn(title="CREATED UTC", cell=lambda each: iso_utc(each.created_ns) or NOTHING, wide=True),
    ListColumn(title="ENDED", cell=lambda each: iso_local(each.ended_ns) or NOTHING, wide=True),
    ListColumn(title="PID", cell=lambda each: _first([str(target.pid) for target in each.targets])),
    ListColumn(title="JOB", cell=lambda each: _first(_jobs(each))),
    ListColumn(title="TOP CAUSE", cell=_cause, optional=True),
    ListColumn(title="SIZE", cell=lambda each: units.size(stored(each))),
    ListColumn(title="WHERE", cell=where),
    ListColumn(title="FORMATS", cell=lambda each: ",".join(each.spec.formats) or NOTHING, wide=True),
    ListColumn(title="LABELS", cell=_labels),
    ListColumn(title="COMMAND", cell=lambda each: _first(commands(each))),
)
CAPTURES = ListKind(
    columns=CAPTURE_COLUMNS,
    key=lambda each: (each.id,),
    document=document,
    orders={
        "age": (lambda each: each.created_ns, True),  # the newest first
        "size": (stored, True),
        "status": (lambda each: enum_names.capture_status(each.status), False),
        "pid": (lambda each: min((target.pid for target in each.targets), default=0), False),
        "job": (lambda each: (not _jobs(each), _jobs(each)), False),
    },
)
