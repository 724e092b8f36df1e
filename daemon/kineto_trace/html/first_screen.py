"""What a reader sees first, in the report and on the web page: what the time went to, what to change, what is missing.

Of several ranks the findings are those of the job, each once, as `kinetoctl report` prints them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from statistics import fmean
from typing import Any

from kineto_trace.analysis.findings.common_findings import common_findings
from kineto_trace.base.quantities import spans, time_text, times
from kineto_trace.base.visible_text import one_line
from kineto_trace.catalog.view_runner import Request
from kineto_trace.view_api.result import Result

LEAST_SHARE = 1.0  # %: causes with less are one row
MAX_VALUES = 4  # of a fact that differs from rank to rank
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_ALWAYS = ("recordings", "overview", "not_recorded", "findings")
# Views of the first screen that say nothing of one rank alone.
OF_SEVERAL = ("rank_time_causes", "rank_what_if")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstScreen:
    """facts: (name, value) of what was recorded. lead: how long a step takes. time: shares of the time."""

    facts: Sequence[tuple[str, str]]
    lead: str
    time: Result
    findings: Result
    missing: Result


def first_requests(ranks: int) -> list[Request]:
    """What the first screen of a job of so many ranks needs."""
    time = OF_SEVERAL if ranks > 1 else ("time_causes",)
    return [view_request(name) for name in (*_ALWAYS, *time)]


def view_request(name: str) -> Request:
    """The view as pages show it: causes with less than 1 % are one."""
    return Request(view=name, options={"least": LEAST_SHARE} if name.endswith("time_causes") else {})


def first_screen(results: Collection[Result], traces: int) -> FirstScreen:
    """Makes the first screen from the results of first_requests() for so many traces."""
    by_name = {result.view: result for result in results}
    findings, recordings = by_name["findings"], by_name["recordings"].rows()
    ranks = traces - (len(recordings) - len({row["rank"] for row in recordings}))  # some may have several captures
    if traces > 1 and not findings.failure:
        findings = common_findings(findings, ranks, by_name["rank_what_if"], traces=traces)
    return FirstScreen(
        facts=_facts(recordings, ranks),
        lead=_lead(by_name["overview"].rows(), traces, ranks),
        time=_cause_first(by_name["rank_time_causes" if traces > 1 else "time_causes"]),
        findings=findings,
        missing=by_name["not_recorded"],
    )


def _cause_first(result: Result) -> Result:
    """The name that the chart gives a cause comes first."""
    columns = sorted(result.columns, key=lambda column: column.name != "cause")
    return replace(result, columns=tuple(columns), table=result.table.select([column.name for column in columns]))


def _lead(rows: Sequence[Mapping[str, Any]], traces: int, ranks: int) -> str:
    steps = [row["step_us"] for row in rows if row["step_us"] is not None and row["steps"]]
    if not steps:
        return ""
    count = times(max(row["steps"] for row in rows if row["steps"]), "step")
    several = f"on each of {ranks} ranks" if traces == ranks else f"in each of {traces} captures"
    where = f" {several}" if traces > 1 else ""
    return f"A step takes {time_text(fmean(steps))} on average ({count}{where})."


def _facts(rows: Sequence[Mapping[str, Any]], ranks: int) -> list[tuple[str, str]]:
    """Names and values, without those that no trace has."""
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
        ("driver", _joined(f"knows CUDA {row['driver_cuda']}" if row["driver_cuda"] else "" for row in rows)),
        ("CUPTI", _joined(row["cupti"] for row in rows)),
        ("written by", _joined(f"kinetod {row['kinetod']}" if row["kinetod"] else "" for row in rows)),
        ("capture", _joined(row["capture"] for row in rows)),
    ]
    return [(name, text) for name, text in told if text]


def _joined(values: Any) -> str:
    """The different values; the first ones of many."""
    found = list(dict.fromkeys(one_line(value) for value in values if value))
    more = len(found) - MAX_VALUES
    return ", ".join(found[:MAX_VALUES]) + (f" and {more} more" if more > 0 else "")


def _process(rows: Sequence[Mapping[str, Any]]) -> str:
    name, pids = _joined(row["process"] for row in rows), sorted({row["pid"] for row in rows if row["pid"]})
    several = f"pids {spans(pids)}" if len(pids) > 1 else f"pid {pids[0]}" if pids else ""
    return f"{name} ({several})" if name and several else name or several


def _window(lengths_us: Sequence[float]) -> str:
    ends = dict.fromkeys(time_text(length) for length in (min(lengths_us), max(lengths_us))) if lengths_us else {}
    return " to ".join(ends)


def _gpus(names: Sequence[str]) -> str:
    kinds = dict.fromkeys(names)
    return ", ".join(f"{names.count(name)} {name}" if names.count(name) > 1 else name for name in kinds)


def _moment(unix_ns: int) -> str:
    """Local time, and UTC if that is another one."""
    if unix_ns <= 0:
        return ""
    try:
        utc = _EPOCH + timedelta(microseconds=unix_ns // 1000)
        local = utc.astimezone()
    except (OverflowError, OSError, ValueError):
        return ""
    shown = f"{utc:%Y-%m-%d %H:%M:%S} UTC"
    return shown if not local.utcoffset() else f"{local:%Y-%m-%d %H:%M:%S %Z} ({shown})"
