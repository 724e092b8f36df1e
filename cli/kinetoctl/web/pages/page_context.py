"""What pages are made of: the daemon, the traces, the analyses, the templates, and what all pages have in common."""

import json
import re
import shlex
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.html.templates import environment

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.client.daemon_client import Client
from kinetoctl.client.fleet.host_client import HostAnswer
from kinetoctl.client.host_targets import Place
from kinetoctl.client.selection import Selection
from kinetoctl.errors import CliError, NotFound
from kinetoctl.output import units
from kinetoctl.output.console import plain
from kinetoctl.output.stack_groups import line_of
from kinetoctl.output.stack_page import StackLook, look_of
from kinetoctl.output.units import human
from kinetoctl.web.analyses.analysis_queue import Analyses, AnalysisFailed, Computing
from kinetoctl.web.analyses.trace_library import TraceLibrary, TraceSet
from kinetoctl.web.http.web_messages import CSV, JSON, WebAnswer, WebError, WebRequest, WebSession, static_address

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb


# The daemons whose captures and processes the pages show: one here, those of a fleet in `shared.fleet_hosts`.
T = TypeVar("T")
PROGRAM = "kinetoctl"
MAX_STACK_BYTES = 16 << 20  # of one look; a process has 1 to 20 kB, and 3 MiB if its user wants to


def within(most: int) -> Callable[[int], bool]:
    """Says of each amount whether it still fits."""
    left = most

    def fits(amount: int) -> bool:
        nonlocal left
        left -= amount
        return left >= 0

    return fits


class OfHost(NamedTuple, Generic[T]):
    """Something that a daemon has. place: which daemon."""

    place: Place
    item: T


class Unanswered(NamedTuple):
    """A host that did not answer, and why."""

    host: str
    reason: str


class HostsFound(NamedTuple, Generic[T]):
    """What the daemons have, and which of them did not answer."""

    items: Sequence[OfHost[T]]
    unanswered: Sequence[Unanswered] = ()
    most_of_one: int = 0  # items that each host was asked for, if that may be fewer than it has


class Daemons(Protocol):
    """What pages ask of daemons, with the rights of the user who looks."""

    several: bool  # whether pages name hosts

    @property
    def name(self) -> str:
        """What people call them all."""

    def captures(self, limit: int) -> HostsFound[pb.Capture]:
        """The newest captures, at most so many of a host. Raises the client's errors if no host can be asked."""

    def parts(self, capture_id: str) -> HostsFound[pb.Capture]:
        """The capture with this id, or all parts of the one that `kinetoctl trace --hosts` made under it.

        Raises NotFound and the client's errors.
        """

    def unanswered(self, capture_id: str) -> Sequence[Unanswered]:
        """The hosts that did not answer when the parts of this capture were last looked for."""

    def processes(self, *, every: bool) -> HostsFound[pb.Process]:
        """What `kinetoctl ps` lists; every: with --all. Raises the client's errors if no host can be asked."""

    def create(self, address: str, spec: pb.CaptureSpec) -> pb.Capture:
        """Starts a capture on the daemon at this address; empty: the only one. Raises the client's errors."""

    def stacks(self, selector: pb.Selector, address: str | None) -> StackLook:
        """Where these processes stand, of MAX_STACK_BYTES. address: as for `create`; None: all daemons are asked.

        Raises NotFound, and the client's errors if no host answers.
        """

    def client(self, place: Place) -> AbstractContextManager[Client]:
        """A client of one daemon, for files."""

    def command(self, *words: str, address: str = "") -> str:
        """The command line that asks them the same, or only the daemon at this address."""


class OneDaemon:
    """The daemon at one address. connect: opens a client of it."""

    several = False

    def __init__(self, connect: Callable[[], AbstractContextManager[Client]], address: str) -> None:
        self._connect = connect
        self._place = Place("", address)

    @property
    def name(self) -> str:
        """Its address."""
        return self._place.address

    def captures(self, limit: int) -> HostsFound[pb.Capture]:
        """The newest captures. Raises the client's errors."""
        with self._connect() as client:
            return self._found(client.captures({}, limit=limit))

    def parts(self, capture_id: str) -> HostsFound[pb.Capture]:
        """The one capture. Raises the client's errors."""
        with self._connect() as client:
            return self._found([client.capture(capture_id)])

    def unanswered(self, _capture_id: str) -> Sequence[Unanswered]:
        """None: a daemon that does not answer is an error of the page."""
        return ()

    def processes(self, *, every: bool) -> HostsFound[pb.Process]:
        """The processes. Raises the client's errors."""
        with self._connect() as client:
            return self._found(
                client.processes(Selection().to_proto(), include_without_agent=every, trainers=True),
            )

    def create(self, address: str, spec: pb.CaptureSpec) -> pb.Capture:
        """Starts a capture. Raises NotFound for another daemon, and the client's errors."""
        self._check(address)
        with self._connect() as client:
            return client.create(spec, uuid.uuid4().hex)

    def stacks(self, selector: pb.Selector, address: str | None) -> StackLook:
        """Where these processes stand. Raises NotFound for another daemon, and the client's errors."""
        self._check(address)
        with self._connect() as client:
            return look_of([HostAnswer(self._place, client.stacks(selector, within(MAX_STACK_BYTES)), None)])

    def _check(self, address: str | None) -> None:
        if address:
            raise NotFound(f"these pages do not show the host at {address}")

    @contextmanager
    def client(self, _place: Place) -> Iterator[Client]:
        """A client."""
        with self._connect() as client:
            yield client

    def command(self, *words: str, address: str = "") -> str:
        """The command line, with the address of the daemon."""
        return shlex.join((PROGRAM, words[0], "--address", self._place.address, *words[1:]))

    def _found(self, items: "Sequence[T] | Iterator[T]") -> HostsFound[T]:
        return HostsFound([OfHost(self._place, item) for item in items])


WAIT_S = 0.7  # for a result, before a page is shown without it and loads itself again
REFRESH_S = "1"
STARTS = ("start_ns", "time_ns")
LENGTHS = ("duration_us", "step_us", "idle_us", "total_us")  # of what begins at such a time, in columns of the row
LEAST_MARGIN_NS, MARGIN = 100_000, 0.25  # on either side, as in kineto_trace.conversion.time_cut
NS_PER_US = 1000
_PAGE = ("view", "total", "steps", "chart", "bars", "compared")  # of a result for a page, beside what a report has
DEFAULT_ROWS, MAX_ROWS = 100, 20_000
BARS, ALL_BARS, MAX_BARS = (24, 50, 100, 200), "all", 2000  # of a chart; a browser draws so many at once
_NUMBER = re.compile(r"-?[0-9]{1,20}")  # times in ns have no more digits
_SHOWN = 30  # characters of what is none


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContext:
    """What pages work with. ui_origin: where the Perfetto UI is served; empty
    if it is not. editor: template of links that open a source file, as editor_option has them; empty for none.
    scratch: where files are made for the timeline; the system's folder for such files if None.
    """

    settings: CommonOptions
    library: TraceLibrary
    queue: Analyses
    daemons: Daemons
    ui_origin: str
    editor: str = ""
    scratch: Path | None = None

    @property
    def files(self) -> bool:
        """Whether the pages are about files alone."""
        return self.library.of_files

    def parts(self, capture_id: str) -> "Sequence[OfHost[pb.Capture]]":
        """The capture, in parts if it is one of several hosts; nothing for a file. Raises as Daemons.parts does."""
        if self.files:
            self.library.find(capture_id)
            return ()
        return self.daemons.parts(capture_id).items

    def catalog(self, wait_s: float) -> list[dict[str, Any]]:
        """All views with their descriptions. Raises Computing, AnalysisFailed."""
        found: list[dict[str, Any]] = self.queue.result("", {"job": "catalog"}, wait_s=wait_s)
        return found

    def view(self, name: str) -> dict[str, Any] | None:
        """One view of the catalogue."""
        return next((each for each in self.catalog(self.settings.timeout_s) if each["name"] == name), None)

    def ranks(self, traces: TraceSet) -> list[dict[str, Any]]:
        """The ranks of the traces, each with the name of its file. Raises Computing, AnalysisFailed."""
        job = {"job": "ranks", "paths": traces.paths}
        found: list[dict[str, Any]] = self.queue.result(traces.identity, job, wait_s=WAIT_S)
        return found

    def results(
        self, trace_id: str, views: Sequence[str], *, base: str = "", wait_s: float = WAIT_S, **arguments: Any
    ) -> list[dict[str, Any]]:
        """Each view's result. base: the id of the traces to compare with; arguments: of TraceJobs.views.

        Raises NotFound, Computing, TooBusy, AnalysisFailed and the client's errors.
        """
        found: list[dict[str, Any]] = self.answer(
            trace_id, {"job": "views", "names": views, **arguments}, base=base, wait_s=wait_s
        )
        return found

    def first_screen(self, trace_id: str, base: str = "", base_rank: int | None = None) -> list[dict[str, Any]]:
        """What the page of a capture begins with: one value of TraceJobs.first_screen. Raises as `results` does."""
        job = {"job": "first_screen", "base_rank": base_rank}
        found: list[dict[str, Any]] = self.answer(trace_id, job, base=base)
        return found

    def answer(self, trace_id: str, job: dict[str, Any], *, base: str = "", wait_s: float = WAIT_S) -> Any:
        """The value of a job on these traces, and on those of the baseline. Raises as `results` does."""
        traces = self.library.find(trace_id, wait_s)
        identity, job = traces.identity, {**job, "paths": traces.paths}
        if base:
            before = self.library.find(base, wait_s)
            identity, job = f"{identity} {before.identity}", {**job, "base": before.paths}
        return self.queue.result(identity, job, wait_s=wait_s)

    def name(self, trace_id: str) -> str:
        """What people call these traces: their file, folder or URL, or the id of the capture."""
        return self.library.name(trace_id)

    def command(self, *words: str) -> str:
        """The command line that prints what a page shows. Names of traces become what names them in a terminal."""
        if self.files:
            named = [word for name in words[1:] for word in self.library.words(name)]
            return shlex.join((PROGRAM, words[0], *named))
        return self.daemons.command(*words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What came of asking for results: them, or why there are none, or that they are being computed."""

    documents: Sequence[Mapping[str, Any]] = ()
    failure: str = ""
    computing: bool = False

    @property
    def headers(self) -> dict[str, str]:
        """What makes the browser load the page again."""
        return {"Refresh": REFRESH_S} if self.computing else {}


def ask(find: Callable[[], Sequence[Mapping[str, Any]]]) -> Asked:
    """The results that `find` returns, or what happened instead."""
    try:
        return Asked(documents=find())
    except Computing:
        return Asked(computing=True)
    except (AnalysisFailed, CliError) as exc:
        return Asked(failure=str(exc))


def with_help(error: CliError) -> str:
    """What went wrong, and below it what to do."""
    return f"{error}\n{error.help_text}".strip()


def _since(unix_s: float) -> str:
    """How long ago that was; empty for 0."""
    return units.age(int(unix_s * 1e9)) if unix_s else ""


def place_of(row: Mapping[str, Any], trace_id: str, rank: str = "") -> str:
    """The address of the timeline at the place of a row; empty if the row does not say when it was.

    rank: of the trace, if the row has none. A finding is shown where its operator, or its first kernel, ran longest.
    """
    own = row.get("rank")
    of_rank = {"rank": own} if own is not None else {"rank": rank} if rank else {}
    start = next((row[name] for name in STARTS if row.get(name)), None)
    if start is not None:
        length = next((row[name] for name in LENGTHS if row.get(name)), 0.0) * NS_PER_US
        margin = max(LEAST_MARGIN_NS, int(MARGIN * length))
        fields = {**of_rank, "t0": start - margin, "t1": start + int(length) + margin}
    else:
        name = _subject(row)
        if not name:
            return ""
        fields = {**of_rank, "name": name}
    return f"/c/{trace_id}/timeline?{urlencode(fields)}"


def places_of(document: Mapping[str, Any], trace_id: str, rank: str = "") -> list[str]:
    """The place of each row of a result; none at all if no row has one."""
    found = [place_of(row, trace_id, rank) for row in document["rows"]]
    return found if any(found) else []


def _subject(row: Mapping[str, Any]) -> str:
    """What a finding is about."""
    if "finding" not in row:
        return ""
    return str(row.get("op") or next(iter(row.get("kernels") or []), ""))


def _environment() -> Environment:
    made = environment(PackageLoader("kinetoctl.web.pages", "templates"))
    made.globals["static"] = static_address
    made.filters.update(
        human=human, size=units.size, age=units.age, moment=units.moment, since=_since, places_of=places_of
    )
    made.filters["line_of"] = line_of
    return made


_templates = _environment()


def render(name: str, context: PageContext, request: WebRequest, session: WebSession, /, **values: Any) -> WebAnswer:
    """A page from its template; `id`, if given, is that of the traces that it is about.

    asked: what it waits for, if anything. headers: of the answer, in place of those of `asked`. unanswered: the hosts
    that are missing in what it shows.
    """
    headers = values.pop("headers", values["asked"].headers if "asked" in values else {})
    if "id" in values:
        values = {"name": context.name(values["id"]), **values}
    unanswered = values.pop("unanswered", None)
    if unanswered is None:
        unanswered = context.daemons.unanswered(values.get("id", ""))
    text = _templates.get_template(name).render(
        files=context.files,
        editor=context.editor,
        path=request.path,
        form_secret=session.form_secret,
        host=context.daemons.name,
        unanswered=unanswered,
        **values,
    )
    return WebAnswer(content=text.encode("utf-8", "replace"), headers=headers)


def plain_page(name: str, /, **values: Any) -> bytes:
    """A page outside of a session."""
    return _templates.get_template(name).render(**values).encode()


def json_answer(value: Any) -> WebAnswer:
    """Any plain value."""
    content = json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1)
    return WebAnswer(content=content.encode("utf-8", "replace"), content_type=JSON)


def hosts_answer(found: "HostsFound[Any]", name: str, *, several: bool) -> WebAnswer:
    """The messages of daemons. several: with their hosts, under this name, and with the hosts that did not answer."""
    if not several:
        return json_answer([plain(each.item) for each in found.items])
    items = [{**plain(each.item), "host": each.place.host, "address": each.place.address} for each in found.items]
    return json_answer({name: items, "unanswered": [each._asdict() for each in found.unanswered]})


def results_answer(documents: Sequence[Mapping[str, Any]]) -> WebAnswer:
    """The results of views, as `kinetoctl report -o json` has them (docs/report.schema.json describes one)."""
    every = [each for document in documents for each in (document, document.get("compared")) if each is not None]
    return json_answer(
        {each["view"]: {name: value for name, value in each.items() if name not in _PAGE} for each in every}
    )


def csv_answer(text: str, name: str) -> WebAnswer:
    """A table that the browser saves as `name`.csv."""
    headers = {"Content-Disposition": f'attachment; filename="{name}.csv"'}
    return WebAnswer(content=text.encode(), content_type=CSV, headers=headers)


def data_address(request: WebRequest, without: Sequence[str] = (), suffix: str = ".json") -> str:
    """Where the values behind this page are in that form, with its fields but for those in `without`."""
    kept = [(key, value) for key, value in request.query if value and key not in without]
    return f"{request.path}{suffix}" + (f"?{urlencode(kept)}" if kept else "")


def whole_number(request: WebRequest, name: str) -> str:
    """A field that is a whole number; empty if it is missing. Raises WebError."""
    text = request.first(name)
    if text and not _NUMBER.fullmatch(text):
        raise WebError(HTTPStatus.BAD_REQUEST, f"{name} must be a whole number, not {text[:_SHOWN]!r}")
    return text


def row_limit(request: WebRequest, rows: int = DEFAULT_ROWS) -> int:
    """How many rows a table may have, from the field `limit`. Raises WebError."""
    return min(MAX_ROWS, max(1, int(whole_number(request, "limit") or rows)))


def word(request: WebRequest, name: str, known: Sequence[str]) -> str:
    """A field that is one of a few words; empty if it is missing. Raises WebError, which names them."""
    text = request.first(name)
    if text and text not in known:
        why = f"must be one of {', '.join(known)}; got {text[:_SHOWN]!r}" if known else "cannot be used on this page"
        raise WebError(HTTPStatus.BAD_REQUEST, f"{name} {why}")
    return text


def bar_limit(request: WebRequest) -> int:
    """How many bars a chart may have, from the field `bars`. Raises WebError."""
    if request.first("bars") == ALL_BARS:
        return MAX_BARS
    return min(MAX_BARS, max(1, int(whole_number(request, "bars") or BARS[0])))


def rank_choices(ranks: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The ranks of the traces for a selector."""
    return [(str(each["rank"]), f"{each['rank']} ({each['name']})") for each in ranks]
