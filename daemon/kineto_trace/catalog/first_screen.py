"""The first answer about traces: where the time goes and what to change, in a verdict and in the tables behind it.

`kinetoctl report`, its JSON, the HTML report and the web page begin with the same `verdict`.

Theory of operation
    The verdict has the length of a step, the finding that saves most, what to do about it, and how sure the saving
    is. Where nothing is sure to save time, it names the largest cause instead, and calls the best finding a rough
    estimate. A truncated file gets no verdict on its time, since Chrome traces hold operators, Python and the GPU's
    work one after the other. A program that stands still has no steps worth a figure: where each rank stands is the
    answer, the odd one out first.

    Traces are ranks of one job if they say so: by a rank that is stated in the trace or in its name, by a world size,
    or because their windows overlap. Otherwise they are runs of a program, one after the other, and their figures must
    not be averaged.
"""

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kineto_trace.analysis.finding import DIAGNOSED, remedy
from kineto_trace.analysis.findings.common_findings import common_findings
from kineto_trace.analysis.host_findings.standing import NOTHING_MOVED, STANDS_STILL
from kineto_trace.analysis.host_time.cpu_shortage import CROWDED_OUT
from kineto_trace.analysis.idle_gaps import MUCH_LEFT_OUT
from kineto_trace.base.quantities import format_duration, format_ranges, times
from kineto_trace.base.source_places import place_parts
from kineto_trace.base.visible_text import one_line
from kineto_trace.catalog.view_runner import Request, run_views, sources_of
from kineto_trace.model.trace import DOUBTED
from kineto_trace.open.trace_source import WEAK, Source
from kineto_trace.view_api.cell_texts import ON_RANKS, VERDICT, percent, saving
from kineto_trace.view_api.result import Result, columns, make_result

LEAST_SHARE = 1.0  # %: causes with less are one row
MAX_VALUES = 4  # of a fact that differs from rank to rank
MAX_PLACES = 3  # where ranks stand, in the verdict
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ALWAYS = ("recordings", "not_recorded", "findings")
# Views of the first screen that need several ranks.
OF_SEVERAL = ("rank_time_causes", "rank_what_if")
_OF_RUNS = ("recordings", "time_causes", "findings")
_GPU_IDLE, _GPU_COMPUTES = "GPU idle: ", "GPU computes: "
RUNS = "runs"
_VERDICT_COLUMNS = columns(("verdict", "text", "", "where the time goes and what to change, in a few sentences"))
_RUN_COLUMNS = columns(
    ("trace", "text", "", "file or folder of the run"),
    ("started", "text", "", "start of the recording, local time"),
    ("step_us", "float", "us", "mean length of a measured step; missing without steps"),
    ("change_pct", "float", "%", "change of the step time from the run before; missing for the first run"),
    ("share_pct", "float", "%", "share of the time spent on the largest cause"),
    ("meaning", "text", "", "largest cause: where most of the time goes"),
    ("finding", "text", "", "finding that could save the most"),
)
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstScreen:
    """What a reader sees first.

    facts: (name, value) of the recording.
    verdict: where the time goes and what to change, in a few sentences.
    cause: what the verdict names, in a few words; "" if it names none.
    time: shares of the time.
    """

    facts: Sequence[tuple[str, str]]
    verdict: str
    cause: str
    time: Result
    findings: Result
    missing: Result


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """Traces that are runs of a program, one after the other.

    newest: the one to look at.
    verdict: how its steps compare with those of the run before it.
    table: all runs, the newest first.
    """

    newest: Source
    verdict: str
    table: Result


def first_requests(ranks: int) -> list[Request]:
    """Returns the views for the first screen of a job of so many ranks."""
    time = OF_SEVERAL if ranks > 1 else ("time_causes",)
    return [view_request(name) for name in (*_ALWAYS, *time)]


def view_request(name: str) -> Request:
    """Requests the view as pages show it: causes with less than 1 % are merged."""
    return Request(view=name, options={"least": LEAST_SHARE} if name.endswith("time_causes") else {})


def first_screen(results: Collection[Result], traces: int) -> FirstScreen:
    """Makes the first screen from the results of first_requests() for so many traces."""
    by_name = {result.view: result for result in results}
    findings, recordings = by_name["findings"], by_name["recordings"].rows()
    ranks = traces - (len(recordings) - len({row["rank"] for row in recordings}))  # some may have several captures
    if traces > 1 and not findings.failure:
        findings = common_findings(findings, ranks, by_name["rank_what_if"], traces=traces)
    time = by_name["rank_time_causes" if traces > 1 else "time_causes"]
    return FirstScreen(
        facts=_facts(recordings, ranks),
        verdict=verdict(findings, time, ranks=ranks, traces=traces),
        cause=top_cause(findings, time, traces=traces),
        time=_cause_first(time),
        findings=findings,
        missing=by_name["not_recorded"],
    )


def first_screen_of(paths: Sequence[Path], *, executor: Executor | None = None) -> FirstScreen:
    """Makes the first screen of the traces of one capture. executor: where to read them; None: as run_views chooses.

    Raises FileError, TraceError.
    """
    sources = sources_of(paths)
    requests = first_requests(len(sources))
    return first_screen(run_views(requests, sources, executor=executor), len(sources))


def _cause_first(result: Result) -> Result:
    """Returns the result with the chart's name of a cause in the first column."""
    ordered = sorted(result.columns, key=lambda column: column.name != "cause")
    return replace(result, columns=tuple(ordered), table=result.table.select([column.name for column in ordered]))


def _facts(rows: Sequence[Mapping[str, Any]], ranks: int) -> list[tuple[str, str]]:
    """Returns names and values, without those that no trace has."""
    world = max((row["world_size"] or 0 for row in rows), default=0)
    told = [
        ("job", _joined(row["job"] for row in rows)),
        ("labels", _joined(label for row in rows for label in row["labels"] or ())),
        ("command", _joined(row["command"] for row in rows)),
        ("process", _process(rows)),
        ("host", _joined(row["host"] for row in rows)),
        ("GPU", _joined(_gpus(row["gpus"] or ()) for row in rows)),
        ("ranks", f"{ranks} of {world}" if world > ranks else str(ranks) if ranks > 1 else ""),
        ("rank", str(rows[0]["rank"]) if ranks == 1 and world > 1 and rows else ""),
        ("recorded", _moment(min((row["start_ns"] for row in rows if row["start_ns"]), default=0))),
        ("window", _window([row["length_us"] for row in rows if row["length_us"]])),
        ("framework", _joined(row["framework"] for row in rows)),
        ("Python", _joined(row["python"] for row in rows)),
        ("CUDA", _joined(row["cuda"] for row in rows)),
        ("driver", _joined(f"supports CUDA {row['driver_cuda']}" if row["driver_cuda"] else "" for row in rows)),
        ("CUPTI", _joined(row["cupti"] for row in rows)),
        ("written by", _joined(f"kinetod {row['kinetod']}" if row["kinetod"] else "" for row in rows)),
        ("capture", _joined(row["capture"] for row in rows)),
    ]
    return [(name, text) for name, text in told if text]


def _joined(values: Any) -> str:
    """Returns the different values; the first ones if there are many."""
    found = list(dict.fromkeys(one_line(value) for value in values if value))
    more = len(found) - MAX_VALUES
    return ", ".join(found[:MAX_VALUES]) + (f" and {more} more" if more > 0 else "")


def _process(rows: Sequence[Mapping[str, Any]]) -> str:
    name, pids = _joined(row["process"] for row in rows), sorted({row["pid"] for row in rows if row["pid"]})
    several = f"pids {format_ranges(pids)}" if len(pids) > 1 else f"pid {pids[0]}" if pids else ""
    return f"{name} ({several})" if name and several else name or several


def _window(lengths_us: Sequence[float]) -> str:
    ends = (min(lengths_us), max(lengths_us)) if lengths_us else ()
    return " to ".join(dict.fromkeys(format_duration(1000 * length) for length in ends))


def _gpus(names: Sequence[str]) -> str:
    kinds = dict.fromkeys(names)
    return ", ".join(f"{names.count(name)} {name}" if names.count(name) > 1 else name for name in kinds)


def _moment(unix_ns: int) -> str:
    """Formats local time, and UTC if that differs."""
    if unix_ns <= 0:
        return ""
    try:
        utc = _EPOCH + timedelta(microseconds=unix_ns // 1000)
        local = utc.astimezone()
    except (OverflowError, OSError, ValueError):
        return ""
    shown = f"{utc:%Y-%m-%d %H:%M:%S} UTC"
    return shown if not local.utcoffset() else f"{local:%Y-%m-%d %H:%M:%S %Z} ({shown})"


def verdict(findings: Result, time: Result | None, *, ranks: int, traces: int) -> str:
    """Returns where the time goes and what to change, in a few sentences; "" if nothing is known.

    findings: those of the trace or job, the most important one first.
    time: view time_causes, or rank_time_causes of several traces; None if it has no rows.
    """
    if cut := findings.truncation:
        return (
            f"{_sentence(cut).lstrip()} Entire kinds of activity may be missing, so the shares of the time are "
            "unreliable: copy the file again, or record a new trace."
        )
    rows, causes = findings.rows(), [] if time is None else time.rows()
    if standing := _standing(rows):
        return _standstill(standing, traces)
    lead = f"{_sentence(findings.note(DOUBTED))} {_length(causes, ranks, traces)}".lstrip()
    best = next(filter(_is_sure, rows), None)
    told = (_sentence(findings.note(words)) for words in (MUCH_LEFT_OUT, CROWDED_OUT))
    beside = "".join(told) if traces == 1 else ""
    if best is not None:
        found, to_do = f"{lead}{_title(best, traces)}.", _to_do(best)
        if to_do and best["finding"] not in DIAGNOSED:
            return f"{found}{to_do} That {saving(best)}.{beside}"
        return f"{found} Changing that {saving(best)}.{to_do}{beside}"
    if not causes:
        return beside.lstrip()
    largest, whole = max(causes, key=lambda row: row["share_pct"]), "it" if lead else "the recorded time"
    parts = [f"{lead}{percent(largest['share_pct'])} of {whole} is {_cause(largest['meaning'])}."]
    if rows:
        parts.append(f"Most promising, by a rough estimate: {_lowered(_title(rows[0], traces))}.{_to_do(rows[0])}")
    elif not findings.failure:
        parts.append("No finding would save half a per cent or more.")
    return " ".join(parts) + beside


def _sentence(note: str) -> str:
    """Returns a note as a sentence, with a space before it; "" if there is none."""
    return f" {note[:1].upper()}{note[1:]}." if note else ""


def top_cause(findings: Result, time: Result | None, *, traces: int) -> str:
    """Returns the cause that the verdict names; "" if it names none. The arguments are those of verdict()."""
    if findings.truncation:
        return ""
    rows, causes = findings.rows(), [] if time is None else time.rows()
    best = _standing(rows)[:1] or [row for row in rows if _is_sure(row)][:1]
    if best:
        return _title(best[0], traces)
    if not causes:
        return ""
    largest = max(causes, key=lambda row: row["share_pct"])
    return f"{percent(largest['share_pct'])}: {largest['meaning']}"


def _standing(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["finding"] == STANDS_STILL]


def _is_sure(row: Row) -> bool:
    """Whether the finding has a saving that is no guess."""
    return bool(row["saving_us"]) and not row["guess"]


def _to_do(row: Row) -> str:
    """Returns the remedy as a sentence, with a space before it; "" if there is none."""
    return f" {text}." if (text := remedy(row)) else ""


def verdict_result(text: str) -> Result:
    """Returns the verdict as a result, for formats that hold results."""
    return make_result(VERDICT, _VERDICT_COLUMNS, {"verdict": [text or None]})


def _standstill(rows: Sequence[Row], traces: int) -> str:
    """Returns where the ranks stand; places that few ranks share come first."""
    if len(rows) == 1 and traces > 1 and not rows[0]["title"].endswith(ON_RANKS):
        return f"Nothing moved on rank {rows[0]['rank']}: {rows[0]['title'].removeprefix(NOTHING_MOVED)}."
    if len(rows) == 1:
        return f"{rows[0]['title']}."
    places = [f"{_rank(row)}{row['title'].removeprefix(NOTHING_MOVED)}" for row in rows[:MAX_PLACES]]
    more = f" {times(len(rows) - MAX_PLACES, 'more place')}: see the findings." if len(rows) > MAX_PLACES else ""
    return f"Nothing moved. {'. '.join(text[:1].upper() + text[1:] for text in places)}.{more}"


def _rank(row: Row) -> str:
    return "" if row["title"].endswith(ON_RANKS) or row.get("rank") is None else f"rank {row['rank']}: "


def _title(row: Row, traces: int) -> str:
    """Returns the title of a finding with its place; in a job, with the rank if only one has it."""
    title = str(row["title"]).rstrip(".")
    common, rank = title.endswith(ON_RANKS), f"rank {row['rank']}"
    place = place_parts(row.get("where") or "")
    if len(place) == 2 and place[0] not in title:
        title += f"{f', on {rank}' if common else ','} mostly in {' '.join(place)}"
    return title if traces == 1 or common or rank in title else f"{title} (on {rank})"


def _lowered(text: str) -> str:
    """Returns a title as a part of a sentence: only an ordinary first word loses its capital."""
    first = text.split(" ", 1)[0]
    return text[:1].lower() + text[1:] if first.istitle() and first.isalpha() else text


def _cause(meaning: str) -> str:
    """Returns the meaning of a cause as a part of a sentence."""
    if meaning.startswith(_GPU_IDLE):
        return f"time in which the GPU is idle: {meaning.removeprefix(_GPU_IDLE)}"
    if meaning.startswith(_GPU_COMPUTES):
        return f"computation on the GPU: {meaning.removeprefix(_GPU_COMPUTES)}"
    return meaning


def step_length_ns(causes: Sequence[Row]) -> float | None:
    """Returns the mean length (ns) of the measured steps, by the causes that make them up; None without steps."""
    if not causes or any(row["step_us"] is None for row in causes):
        return None
    devices = len({row["device"] for row in causes}) if "device" in causes[0] else 1
    return float(1e3 * sum(row["step_us"] for row in causes) / devices)


def _length(causes: Sequence[Row], ranks: int, traces: int) -> str:
    """Returns a sentence on how long a step takes, with a space behind it; "" without steps."""
    step_ns = step_length_ns(causes)
    if step_ns is None:
        return ""
    several = f" on each of {ranks} ranks" if traces == ranks else f" in {traces} captures"
    return f"A step takes {format_duration(step_ns)} on average{several if traces > 1 else ''}. "


def find_runs(sources: Sequence[Source], *, executor: Executor | None = None) -> Runs | None:
    """Returns the runs that these traces are; None if they are ranks of a job, or may be.

    Reads the traces only where nothing in their names or heads says that they are ranks. Raises FileError if none of
    them can be read.
    """
    if not _may_be_runs(sources):
        return None
    results = {result.view: result.rows() for result in run_views(_OF_RUNS, sources, executor=executor)}
    ordered = _in_order(sources, results["recordings"])
    return _compared(ordered, results) if ordered else None


def runs_in_order(sources: Sequence[Source], *, executor: Executor | None = None) -> list[Source]:
    """Returns these traces, oldest first, if they are runs by the rules of find_runs(); else []. Raises likewise."""
    if not _may_be_runs(sources):
        return []
    (recordings,) = run_views(_OF_RUNS[:1], sources, executor=executor)
    return _in_order(sources, recordings.rows())


def runs_text(ordered: Sequence[Source], change: str = "") -> str:
    """Returns that these traces are runs, the oldest first, and the command that compares the last two.

    change: how the newest one differs from the one before it.
    """
    return (
        f"These are {len(ordered)} consecutive runs, not ranks of one job{change and ': '}{change}. "
        f"`kinetoctl diff {ordered[-2].place} {ordered[-1].place}` compares the last two."
    )


def _may_be_runs(sources: Sequence[Source]) -> bool:
    return len(sources) > 1 and all(source.rank_from in WEAK for source in sources)


def _in_order(sources: Sequence[Source], rows: Sequence[Row]) -> list[Source]:
    """Returns the runs, the oldest first; [] if they are ranks of a job, or may be."""
    recordings = {row["rank"]: row for row in rows}
    if set(recordings) != {source.rank for source in sources} or len(recordings) < len(sources):
        return []  # some say which ranks they are, or several are of one process
    if any((row["world_size"] or 1) > 1 or not _has_window(row) for row in recordings.values()):
        return []
    ordered = sorted(sources, key=lambda source: recordings[source.rank]["start_ns"])
    windows = [recordings[source.rank] for source in ordered]
    overlap = any(_end_ns(before) > after["start_ns"] for before, after in zip(windows, windows[1:], strict=False))
    return [] if overlap else ordered


def _has_window(row: Row) -> bool:
    return row["start_ns"] is not None and row["length_us"] is not None


def _end_ns(row: Row) -> int:
    return int(row["start_ns"] + 1000 * row["length_us"])


def _compared(ordered: Sequence[Source], results: Mapping[str, Sequence[Row]]) -> Runs:
    """Compares runs, the oldest first, each with the one before it."""
    recordings = {row["rank"]: row for row in results["recordings"]}
    rows: list[dict[str, Any]] = []
    for source in ordered:
        causes = [row for row in results["time_causes"] if row["rank"] == source.rank]
        found = next((row for row in results["findings"] if row["rank"] == source.rank), None)
        step_ns = step_length_ns(causes)
        before = rows[-1]["step_us"] if rows else None
        largest = max(causes, key=lambda row: row["share_pct"], default=None)
        rows.append(
            {
                "trace": source.path.name,
                "started": _moment(recordings[source.rank]["start_ns"]),
                "step_us": step_ns and step_ns / 1e3,
                "change_pct": 100 * (step_ns / 1e3 / before - 1) if before and step_ns else None,
                "share_pct": largest and largest["share_pct"],
                "meaning": largest and largest["meaning"],
                "finding": found and found["title"],
            }
        )
    newest, table, change = rows[-1], rows[::-1], ""
    if newest["change_pct"] is not None:
        took = format_duration(1e3 * newest["step_us"])
        change = f"a step of the newest run takes {took}, {_change(newest['change_pct'])} the run before"
    return Runs(
        newest=ordered[-1],
        verdict=runs_text(ordered, change),
        table=make_result(
            RUNS, _RUN_COLUMNS, {column.name: [row[column.name] for row in table] for column in _RUN_COLUMNS}
        ),
    )


def _change(change_pct: float) -> str:
    if abs(change_pct) < LEAST_SHARE:
        return "about as long as in"
    return f"{percent(abs(change_pct))} {'more' if change_pct > 0 else 'less'} than in"
