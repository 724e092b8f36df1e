"""What a worker can do with traces: name the views, compute them, compare two traces, run SQL, export for the timeline.

Every answer is a plain value for JSON. Open traces are kept, the most recent ones only, so that the second view of a
trace does not read it again.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import urlencode

from kineto_trace.analysis.diff.diff_views import compare_jobs
from kineto_trace.analysis.diff.view_differences import extent, view_differences
from kineto_trace.catalog.first_screen import find_runs, first_requests, first_screen
from kineto_trace.catalog.view_catalog import VIEWS, find_view
from kineto_trace.catalog.view_runner import (
    NO_MEMORY,
    Contribution,
    Request,
    all_combined,
    contribution_of,
    opened_context,
    unopened,
)
from kineto_trace.conversion.time_cut import focus_of, longest, with_margin, write_timeline
from kineto_trace.errors import FileError, TraceError
from kineto_trace.html.documents import titles
from kineto_trace.html.snapshot_map import MapLinks, segment_map
from kineto_trace.html.time_charts import ChartLine, Marks, curves
from kineto_trace.html.view_charts import MAX_BARS, page_parts
from kineto_trace.model.context import Context
from kineto_trace.open.trace_discovery import Source, find_traces
from kineto_trace.open.trace_opener import Form, detect
from kineto_trace.snapshots.snapshot_reader import (
    INACTIVE,
    NO_STACK,
    MemorySnapshot,
    SnapshotBlock,
    SnapshotSegment,
    process_name,
    read_snapshot,
)
from kineto_trace.snapshots.snapshot_results import (
    NamedSnapshot,
    address_text,
    block_at,
    device_memory,
    lead,
    snapshot_curve,
    snapshot_ooms,
    snapshot_results,
)
from kineto_trace.view_api.option_words import option_words
from kineto_trace.view_api.plot_shapes import bar_columns
from kineto_trace.view_api.result import Result, make_result
from kineto_trace.view_api.result_files import csv_bytes
from kineto_trace.view_api.view import Compat, View
from markupsafe import Markup

from kinetoctl.base.view_settings import COMPARED_FIRST, COUNTERPARTS, options_of, type_text
from kinetoctl.errors import CliError, NotFound, UsageProblem
from kinetoctl.output.result_tables import documents
from kinetoctl.output.units import human
from kinetoctl.web.analyses.flame_job import DRAWINGS, FlameOrder, flame_request, flame_values
from kinetoctl.web.analyses.trace_list import identity

MAX_OPEN = 8  # ranks
MAX_ROWS = 20_000  # of one result
MAX_CSV_ROWS = 200_000
DIFF, STEP = "diff_", "step"
OWN_RULES = "the comparison uses kinetod's own rules"
NO_COMMON_RANK = "the two jobs have no rank in common"
SNAPSHOT_VIEWS = ("snapshot_devices", "snapshot_stacks", "snapshot_ooms", "snapshot_curve", "snapshot_segments")
BLOCKS = "snapshot_blocks"  # of the chosen segment
MAX_FRAMES = 200  # of a block
MAX_MARKS = 100  # in a curve
_OF_THE_UI = (Form.CHROME, Form.PERFETTO)  # which it reads as they are
_PLACE = re.compile(r"([0-9]{1,4})-0x([0-9a-f]{1,16})")  # device and address


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineTraces:
    """The traces to compare with; none: nothing is compared. rank: the only one, with which every trace is compared."""

    sources: Sequence[Source] = ()
    rank: int | None = None

    def pairs(self, others: Sequence[Source]) -> list[tuple[Source, Source]]:
        """The trace of the baseline for each of these that it has one for: of the same rank, or the only one.

        Two traces are compared whatever their ranks. Raises NotFound.
        """
        if self.rank is not None or len(self.sources) == len(others) == 1:
            return [(self.sources[0], other) for other in others]
        known = {source.rank: source for source in self.sources}
        found = [(known[other.rank], other) for other in others if other.rank in known]
        if not found:
            raise NotFound(NO_COMMON_RANK)
        return found


def of_rank(sources: Sequence[Source], rank: int | None, *, baseline: bool = False) -> list[Source]:
    """The traces of this rank; all of them for None. Raises NotFound."""
    chosen = [source for source in sources if rank is None or source.rank == rank]
    if not chosen:
        known = ", ".join(str(each.rank) for each in sources)
        whose = " in the baseline" if baseline else ""
        raise NotFound(f"there is no trace of rank {rank}{whose}; available: {known}")
    return chosen


class _Open(NamedTuple):
    """An open trace. source: with the rank that the trace states; stack: closes what was fetched for it.

    identity: of the files when they were opened (trace_list.identity).
    """

    source: Source
    context: Context
    stack: ExitStack
    identity: str


class TraceJobs:
    """The jobs, by name, and the open traces."""

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[str, int], _Open] = OrderedDict()
        self._snapshots = SnapshotJob()
        self._jobs: Mapping[str, Callable[..., Any]] = {
            "catalog": self.catalog,
            "ranks": self.ranks,
            "first_screen": self.first_screen,
            "views": self.views,
            "csv": self.csv,
            "query": self.query,
            "query_csv": self.query_csv,
            "timeline": self.timeline,
            "flame": self.flame,
            "snapshot": self._snapshots.values,
        }

    def run(self, job: Mapping[str, Any]) -> Any:
        """Runs a job: its name as `job`, and its arguments. Raises TraceError, CliError."""
        return self._jobs[job["job"]](**{name: value for name, value in job.items() if name != "job"})

    def forget(self) -> None:
        """Closes all traces, and frees the snapshot."""
        for found in self._open.values():
            found.stack.close()
        self._open.clear()
        self._snapshots.forget()

    def catalog(self) -> list[dict[str, Any]]:
        """Every view with what it says, its options and its columns."""
        return [_described(view) for view in VIEWS.values()]

    def ranks(self, paths: Sequence[str]) -> list[dict[str, Any]]:
        """The traces at these paths."""
        return [{"rank": source.rank, "name": source.path.name} for source in find_traces(*paths)]

    def first_screen(
        self, paths: Sequence[str], base: Sequence[str] = (), base_rank: int | None = None
    ) -> list[dict[str, Any]]:
        """What the page of a capture begins with, in one value: texts, and a document for each table.

        lacking: the parts of a trace (view validate) that none of the traces has.
        base, base_rank: as for views; then `compared` has the views that COMPARED_FIRST names.
        """
        sources = self._sources(paths, None)
        runs = find_runs(sources)
        sources = sources if runs is None else [runs.newest]
        results = self._combined([*first_requests(len(sources)), Request(view="validate")], sources)
        found, parts = first_screen(results, len(sources)), results[-1].rows()
        return [
            {
                "facts": found.facts,
                "verdict": found.verdict,
                "about_runs": "" if runs is None else runs.verdict,
                "runs": None if runs is None else _document(runs.table, "", MAX_ROWS),
                "several": len(sources) > 1,
                "time": _document(found.time, "", MAX_ROWS),
                "compared": self.views(COMPARED_FIRST, paths, base, compare=COMPARED_FIRST, base_rank=base_rank)
                if base
                else [],
                "findings": _document(found.findings, "", MAX_ROWS),
                "missing": _document(found.missing, "", MAX_ROWS),
                "lacking": sorted(
                    {row["part"] for row in parts} - {row["part"] for row in parts if row["complete_pct"]}
                ),
            }
        ]

    def views(
        self,
        names: Sequence[str],
        paths: Sequence[str],
        base: Sequence[str] = (),
        rank: int | None = None,
        step: str = "",
        settings: Sequence[tuple[str, str]] = (),
        limit: int = MAX_ROWS,
        drawings: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        compare: Sequence[str] = (),
        base_rank: int | None = None,
        compat: str = Compat.NONE,
        chart: str = "",
        bars: int = MAX_BARS,
    ) -> list[dict[str, Any]]:
        """Each view's result. rank and step: the only ones of interest.

        base: the traces to compare with. base_rank: the only one of them, with which every trace is compared.
        compare: the views that are not comparisons themselves of which a comparison with them is added, as `compared`.
        drawings: the options of those of page_charts, by view; other views have charts of their own, with as many
        bars, of the column `chart` if it is given. compat: the tool whose figures they reproduce.
        """
        views = [find_view(name) for name in names]
        options = options_of(views, [(key, text) for key, text in settings])
        requests = [Request(view=view.name, compat=Compat(compat), options=options[view.name]) for view in views]
        sources = self._sources(paths, rank)
        before = self._baseline(base, base_rank)
        results = self._results(requests, before, sources)
        compared = {
            result.view: self._comparison(request, result, before, sources)
            for request, result in zip(requests, results, strict=True)
            if before.sources and result.view in compare
        }
        documents = [
            _document(result, step, limit, drawings.get(result.view), column=chart, bars=bars) for result in results
        ]
        for document in documents:
            if document["view"] in compared:
                document["compared"] = _document(compared[document["view"]], "", limit)
        return documents

    def csv(
        self,
        name: str,
        paths: Sequence[str],
        base: Sequence[str] = (),
        rank: int | None = None,
        step: str = "",
        settings: Sequence[tuple[str, str]] = (),
        base_rank: int | None = None,
        compat: str = Compat.NONE,
    ) -> str:
        """One view's result as `kinetoctl report -o csv` prints it; of a comparison, with that of `base`."""
        view = find_view(name)
        options = options_of([view], [(key, text) for key, text in settings])[view.name]
        before = self._baseline(base, base_rank)
        request = Request(view=view.name, compat=Compat(compat), options=options)
        (result,) = self._results([request], before, self._sources(paths, rank))
        return _csv(_of_step(result, step))

    def query_csv(self, sql: str, paths: Sequence[str]) -> str:
        """The result of one query as `kinetoctl query -o csv` prints it."""
        return _csv(self._queried(sql, paths))

    def query(self, sql: str, paths: Sequence[str], limit: int = MAX_ROWS) -> list[dict[str, Any]]:
        """The result of one query over the traces."""
        return [_document(self._queried(sql, paths), "", limit)]

    def _queried(self, sql: str, paths: Sequence[str]) -> Result:
        from kineto_trace.sql import Database  # brings DuckDB
        from kineto_trace.sql.arrow_tables import SqlSource

        opened = [SqlSource(source.path.name, self._context(source)) for source in self._sources(paths, None)]
        with Database(opened) as database:
            return database.query(sql)

    def timeline(
        self,
        paths: Sequence[str],
        rank: int | None,
        target: str,
        span: Sequence[int] = (),
        name: str = "",
        tracks: bool = False,
    ) -> dict[str, Any]:
        """Writes the trace of one rank for the timeline. Returns the path of the file, and what to show first of it.

        span: its only part of interest, [start, end) in Unix ns; name: the longest activity of this name, with some
        margin. Without them, the whole trace: a file that the UI reads as it is, unless it gets tracks. tracks: adds
        how busy the GPUs were, except to a whole Perfetto file, or to one that cannot be read.
        """
        source = self._sources(paths, rank)[0]
        if span or name:
            context = self._context(source)
            start, end = span or with_margin(*longest(context.trace, name))
            write_timeline(context, Path(target), (start, end), tracks=tracks)
            return {"path": target}
        form, focus, added = detect(source.path), None, False
        if form in _OF_THE_UI and not tracks:
            return {"path": str(source.path)}
        try:
            context = self._context(source)
            focus = asdict(focus_of(context, perfetto=form is Form.PERFETTO))
            if form is not Form.PERFETTO:
                added = write_timeline(context, Path(target), None, tracks=tracks)
        except (TraceError, MemoryError) as exc:
            if form not in _OF_THE_UI:
                raise
            if isinstance(exc, MemoryError):
                self.forget()
        return {"path": target if added or form not in _OF_THE_UI else str(source.path), "focus": focus}

    def flame(
        self,
        paths: Sequence[str],
        base: Sequence[str] = (),
        rank: int | None = None,
        base_rank: int | None = None,
        **fields: Any,
    ) -> dict[str, Any]:
        """A flame graph for its page. base, base_rank: as for views; fields: those of flame_request."""
        request = flame_request(**fields)
        sources = self._sources(paths, rank)
        sources = sources[:1] if request.order is FlameOrder.TIME else sources
        before = self._baseline(base, base_rank).sources
        before = self._sources(base, rank) if len(before) > 1 else before
        return flame_values(request, map(self._context, sources), map(self._context, before))

    def _sources(self, paths: Sequence[str], rank: int | None) -> list[Source]:
        return of_rank(find_traces(*paths), rank)

    def _baseline(self, paths: Sequence[str], rank: int | None) -> BaselineTraces:
        if not paths:
            return BaselineTraces()
        return BaselineTraces(sources=of_rank(find_traces(*paths), rank, baseline=True), rank=rank)

    def _opened(self, source: Source) -> _Open:
        """The trace, opened now, or before if its files are still the same. Raises TraceError."""
        key, now = (str(source.path), source.rank), identity([source.path])
        found = self._open.pop(key, None)
        if found is not None and found.identity != now:
            found.stack.close()
            found = None
        if found is None:
            while len(self._open) >= MAX_OPEN:
                self._open.popitem(last=False)[1].stack.close()
            with ExitStack() as stack:
                found = _Open(*opened_context(source, stack), stack.pop_all(), now)
        self._open[key] = found
        return found

    def _context(self, source: Source) -> Context:
        return self._opened(source).context

    def _combined(self, requests: Sequence[Request], sources: Sequence[Source]) -> list[Result]:
        """The results of views over ranks, as `kinetoctl report` makes them: a rank that fails is missing in them."""
        return all_combined(requests, [self._contribution(source, requests, len(sources) == 1) for source in sources])

    def _contribution(self, source: Source, requests: Sequence[Request], alone: bool) -> Contribution:
        try:
            found = self._opened(source)
        except TraceError as exc:
            if alone:
                raise
            return unopened(source, requests, exc)
        contribution = contribution_of(found.source, found.context, requests, alone=alone)
        errors = [error for error in contribution.errors if error and error.startswith(NO_MEMORY)]
        if errors:  # may be held by the other traces: not this rank's failure
            raise MemoryError(errors[0].removeprefix(f"{NO_MEMORY}: "))
        return contribution

    def _comparison(self, request: Request, result: Result, base: BaselineTraces, sources: Sequence[Source]) -> Result:
        """The result beside that of the baseline, or why there is no such comparison."""
        try:
            if result.failure:
                raise FileError(result.failure)
            if request.view in COUNTERPARTS:
                found = self._compared(Request(view=COUNTERPARTS[request.view]), base, sources)
                own = () if request.compat is Compat.NONE else (OWN_RULES,)
                return replace(found, notes=(*own, *found.notes))
            pairs = base.pairs(sources)
            before = [(source, other.rank) for source, other in pairs]
            return self._differences(request, result, before, [(source, source.rank) for source in sources])
        except (CliError, TraceError) as exc:
            return replace(make_result(f"{request.view}_difference", (), {}), failure=str(exc))

    def _differences(
        self,
        request: Request,
        result: Result,
        base: Sequence[tuple[Source, int]],
        sources: Sequence[tuple[Source, int]],
    ) -> Result:
        """Compares by rank: each trace counts as the rank that is given beside it."""
        found = [
            replace(contribution, source=replace(contribution.source, rank=rank))
            for contribution, rank in ((self._contribution(source, [request], False), rank) for source, rank in base)
        ]
        (baseline,) = all_combined([request], found)
        before, after = ({rank: self._context(source).get(extent) for source, rank in side} for side in (base, sources))
        return view_differences(baseline, result, (before, after))

    def _results(self, requests: Sequence[Request], before: BaselineTraces, sources: Sequence[Source]) -> list[Result]:
        """The result of each view; of a comparison, if it is the only one, with the traces before."""
        if len(requests) == 1 and requests[0].view.startswith(DIFF):
            return [self._compared(requests[0], before, sources)]
        return self._combined(requests, sources)

    def _compared(self, request: Request, base: BaselineTraces, sources: Sequence[Source]) -> Result:
        view, keywords = find_view(request.view), request.keywords()
        if not base.sources:
            raise FileError(f"view {view.name} compares two traces: choose a baseline")
        pairs = base.pairs(sources)
        sides = (
            base.sources[:1] if base.rank is not None else [before for before, _ in pairs],
            [own for _, own in pairs],
        )
        before, after = ([view.partial(self._context(each), **keywords) for each in side] for side in sides)
        return compare_jobs(view, before, after, **keywords)


def _described(view: View) -> dict[str, Any]:
    columns = [column._asdict() for column in view.result_columns]
    headings = {column["name"]: title for column, title in zip(columns, titles(columns), strict=True)}
    return {
        "name": view.name,
        "description": view.description,
        "compat": sorted(view.compat),
        "charts": [(name, headings[name]) for name in bar_columns(view.name)],
        "options": [
            {
                "name": name,
                "type": type_text(view.option_type(name)),
                "default": _text(default),
                "words": list(option_words(view.option_type(name))),
            }
            for name, default in view.options.items()
        ],
        "columns": columns,
    }


def _text(value: Any) -> str:
    """A default as `--set` takes it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _document(
    result: Result, step: str, limit: int, drawing: Mapping[str, Any] | None = None, **drawn_as: Any
) -> dict[str, Any]:
    """A result as `kinetoctl report -o json` has it, and what a page shows beside it; `chart` is SVG.

    drawing: options of the view's chart in page_charts; drawn_as: of its own chart, as page_parts takes them.
    """
    names = [column.name for column in result.columns]
    steps = list(dict.fromkeys(map(str, result.values(STEP)))) if STEP in names else []
    result, drawn = _of_step(result, step), None
    if drawing is not None and not result.failure:
        result, drawn = DRAWINGS[result.view](result, **drawing)
    return {
        **documents({result.view: result}, limit)[result.view],
        **page_parts(result, drawn, **drawn_as),
        "steps": steps,
    }


def _of_step(result: Result, step: str) -> Result:
    """The result with the rows of one step, if one is chosen and it has rows of steps."""
    if not step or STEP not in [column.name for column in result.columns]:
        return result
    kept = [place for place, value in enumerate(result.values(STEP)) if str(value) == step]
    return replace(result, table=result.table.take(kept))


def _csv(result: Result) -> str:
    if result.failure:
        raise FileError(result.failure)
    if len(result) > MAX_CSV_ROWS:
        raise FileError(f"{len(result):,} rows are too many for a browser: run the command at the bottom of the page")
    return csv_bytes(result).decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotChoice:
    """What of snapshots is shown. process: one of several; segment, block: as `place_text`; page: its address."""

    process: str = ""
    segment: str = ""
    block: str = ""
    page: str = ""
    limit: int = 100


class SnapshotJob:
    """Computes pages of snapshots, and keeps the last snapshot that it has read."""

    def __init__(self) -> None:
        self._kept: tuple[str, MemorySnapshot] | None = None

    def forget(self) -> None:
        """Frees the snapshot."""
        self._kept = None

    def values(self, paths: Sequence[str], **fields: Any) -> dict[str, Any]:
        """What the page shows. fields: those of SnapshotChoice. Raises TraceError, CliError."""
        choice = SnapshotChoice(**fields)
        names = list(dict.fromkeys(process_name(Path(path)) for path in paths))
        process = choice.process or names[0]
        if process not in names:
            raise NotFound(f"there is no snapshot of {process}; available: {', '.join(names)}")
        snapshot = self._read(next(Path(path) for path in paths if process_name(Path(path)) == process))
        segment, block = _chosen(snapshot, choice)
        shown = replace(snapshot, segments=(segment,)) if segment else snapshot
        links = _links(choice, block)
        return {
            "processes": names,
            "process": process,
            "lead": lead(device_memory(snapshot.segments)),
            "documents": [
                *_documents(process, snapshot, SNAPSHOT_VIEWS, choice.limit),
                *(_documents(process, shown, [BLOCKS], choice.limit) if segment else []),
            ],
            "map": str(segment_map(snapshot, shown.segments, links)),
            "curves": str(_curves(snapshot)),
            "block": _told(snapshot, *block, links) if block else None,
            "blocks": [links.block(segment, each) for each in segment.blocks[: choice.limit]] if segment else [],
        }

    def _read(self, path: Path) -> MemorySnapshot:
        """The snapshot, read now or before. Raises TraceError, NotFound."""
        try:
            path.stat()
        except OSError as exc:
            raise NotFound(f"cannot read {path}: {exc.strerror or exc}") from exc
        key = identity([path])
        if self._kept is None or self._kept[0] != key:
            self._kept = None
            self._kept = key, read_snapshot(path)
        return self._kept[1]


def place_text(device: int, address: int) -> str:
    """A segment or block in the address of a page."""
    return f"{device}-{address_text(address)}"


def _place(text: str, what: str) -> tuple[int, int]:
    """Raises UsageProblem."""
    match = _PLACE.fullmatch(text)
    if match is None:
        raise UsageProblem(f"{what} must be a device and an address such as 0-0x7f0000000000, not {text[:40]!r}")
    return int(match[1]), int(match[2], 16)


def _chosen(
    snapshot: MemorySnapshot, choice: SnapshotChoice
) -> tuple[SnapshotSegment | None, tuple[SnapshotSegment, SnapshotBlock] | None]:
    """The segment and the block that are chosen. Raises NotFound, UsageProblem."""
    segment, block = None, None
    if choice.segment:
        device, address = _place(choice.segment, "segment")
        own = (each for each in snapshot.segments if (each.device, each.address) == (device, address))
        segment = next(own, None)
        if segment is None:
            raise NotFound(f"GPU{device} has no segment at {address_text(address)} in this snapshot")
    if choice.block:
        device, address = _place(choice.block, "block")
        block = block_at(snapshot, device, address)
        if block is None:
            raise NotFound(f"GPU{device} has no block at {address_text(address)} in this snapshot")
    return segment, block


def _links(choice: SnapshotChoice, block: tuple[SnapshotSegment, SnapshotBlock] | None) -> MapLinks:
    kept = {"process": choice.process} if choice.process else {}

    def of_segment(segment: SnapshotSegment) -> str:
        place = place_text(segment.device, segment.address)
        return f"{choice.page}?{urlencode({**kept, 'segment': place})}#map"

    def of_block(segment: SnapshotSegment, one: SnapshotBlock) -> str:
        fields = {**kept, "segment": choice.segment} if choice.segment else kept
        return f"{choice.page}?{urlencode({**fields, 'block': place_text(segment.device, one.address)})}#block"

    chosen = (block[0].device, block[1].address) if block else None
    return MapLinks(segment=of_segment, block=of_block, chosen=chosen)


def _documents(process: str, snapshot: MemorySnapshot, views: Sequence[str], limit: int) -> list[dict[str, Any]]:
    results = snapshot_results([NamedSnapshot(process, snapshot)], views)
    return [{**documents({each.view: each}, limit)[each.view], **page_parts(each, Markup(""))} for each in results]


def _curves(snapshot: MemorySnapshot) -> Markup:
    """For each device what was held and reserved over time, with the failures for lack of memory, or the peak."""
    charts = Markup("")
    rows, ooms = snapshot_curve(snapshot), snapshot_ooms(snapshot)
    for device in dict.fromkeys(row["device"] for row in rows):
        own = [row for row in rows if row["device"] == device]
        top = max(own, key=lambda row: row["held_bytes"])
        moments = [(top["time_us"], f"peak {human(top['held_bytes'], 'bytes')}")]
        failed = [row for row in ooms if row["device"] == device][:MAX_MARKS]
        if failed:
            first = f"out of memory: {human(failed[0]['wanted_bytes'], 'bytes')} requested"
            moments = [(row["time_us"], "" if at else first) for at, row in enumerate(failed)]
        times = [row["time_us"] for row in own]
        series = [
            ChartLine("held", times, [row["held_bytes"] for row in own]),
            ChartLine("reserved", times, [row["reserved_bytes"] for row in own]),
        ]
        drawn = curves(series, "bytes", Marks(moments=moments))
        if drawn:
            charts += Markup("<figure><figcaption>{}</figcaption>{}</figure>").format(device, drawn)
    return charts


def _told(snapshot: MemorySnapshot, segment: SnapshotSegment, block: SnapshotBlock, links: MapLinks) -> dict[str, Any]:
    """A block for the page."""
    frames = () if block.stack == NO_STACK else snapshot.stacks[block.stack]
    facts = [
        ("size", human(block.size, "bytes")),
        ("state", block.state),
        ("requested", "" if block.state == INACTIVE else human(block.requested, "bytes")),
        ("stream", str(segment.stream)),
        ("pool", segment.pool),
    ]
    return {
        "name": f"GPU{segment.device} {address_text(block.address)}",
        "facts": [(label, text) for label, text in facts if text],
        "segment": address_text(segment.address),
        "segment_link": links.segment(segment),
        "frames": [str(frame) for frame in frames[:MAX_FRAMES]],
        "more": max(0, len(frames) - MAX_FRAMES),
    }
