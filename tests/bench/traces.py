"""Compares the trace library with HTA (traceinsight), the TensorBoard profiler plug-in and json on the same files.

    python tests/bench/traces.py [--events 100000 1000000 10000000] [--rivals PYTHON] [--file TRACE ...] [--folder DIR]

The files, which all tools read in one run, are synthetic traces with the given numbers of events
(support/synthetic.py) and those named with --file. Every measurement runs in a process of its own. Figures are CPU
seconds unless marked "wall"; memory is by how much the process grew. Rivals get only traces of at most
--rival-events, because they need minutes for a million. They live in an environment of their own, .venv-analysers
(made by `make bench-traces`). A tool that fails on a file is reported as failed.

Exit status 1 if a goal was missed.
"""

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / part) for part in ("tests", "agent", "daemon", "cli", "protos")]

from bench.rival_tools import peak_growth, resident_bytes  # noqa: E402
from support.trace_files import synthetic  # noqa: E402

LAYERS = 48  # of the synthetic model: some 5,800 events a step
TABLES = ("overview_views", "operator_views", "kernel_views")  # modules whose views together have 0.1 s per 100k events
STEP = 1  # instance of ProfilerStep of the critical path
OPERATOR = "aten::linear"  # of the frequent sequences
# Analyses that HTA has too: its measurement -> our views, the first that there is.
SAME = {
    "temporal_breakdown": ("temporal_breakdown",),
    "kernel_breakdown": ("kernel_breakdown",),
    "idle_breakdown": ("idle_breakdown",),
    "overlap": ("comm_comp_overlap",),
    "launches": ("launch_stats",),
    "queue": ("queue_length_summary",),
    "sequences": ("frequent_sequences", "frequent_kernel_sequences", "kernel_sequences"),
    "critical_path": ("critical_path",),
}
GOALS = {"critical_path": 20.0, "sequences": 50.0}
LARGE = 50_000  # events; what it costs to begin at all decides about smaller traces, which have no goals
CHILD_TIMEOUT_S = 1800

Found = dict[str, Any]


@dataclass(slots=True)
class Report:
    """Rows of the table; a missed goal is marked."""

    missed: int = 0
    failures: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        print(f"\n## {text}\n\n| what | ours | beside | ratio | goal | |\n|---|---|---|---|---|---|", flush=True)

    def row(self, what: str, ours: str, beside: str = "", ratio: float | None = None, goal: float = 0) -> None:
        """Adds a row. goal: the least ratio; 0 for none."""
        shown = "" if ratio is None else f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
        self._print(what, ours, beside, shown, f">= {goal:g}" if goal else "", ratio is None or ratio >= goal, goal)

    def limit(self, what: str, value: float, unit: str, *, most: float = 0, least: float = 0) -> None:
        """Adds a figure that may not be above, or below, a limit."""
        good = value <= most if most else value >= least
        goal = f"<= {most:g} {unit}" if most else f">= {least:g} {unit}"
        self._print(what, f"{value:.3g} {unit}", "", "", goal, good, 1)

    def failed(self, what: str, text: str, *, rivals: bool = False) -> None:
        """Adds a rival's failure, which is not a missed goal."""
        self.missed += not rivals
        self.failures.append(f"{what}: {text}")

    def _print(self, what: str, ours: str, beside: str, ratio: str, goal: str, good: bool, counts: float) -> None:
        mark = ("ok" if good else "MISSED") if counts else ""
        self.missed += bool(counts) and not good
        print(f"| {what} | {ours} | {beside} | {ratio} | {goal} | {mark} |", flush=True)


# ------------------------------------------------------------ in processes of their own


def cpu(work: Callable[[], Any], repeat: int = 1) -> float:
    """The best CPU seconds of some runs."""
    best = float("inf")
    for _ in range(repeat):
        begin = time.process_time()
        work()
        best = min(best, time.process_time() - begin)
    return best


def _timed(work: Callable[[], Any]) -> tuple[float, float]:
    """CPU and wall seconds."""
    begin, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - begin, time.perf_counter() - wall


def child_load(file: Path, folder: Path) -> Found:
    """Measures Chrome JSON to columns: first time, best time, memory."""
    import kineto_trace.formats.chrome.chrome_reader  # noqa: F401 - imports are not counted
    from kineto_trace import open_trace

    before = resident_bytes()
    begin = time.process_time()
    trace = open_trace(file)
    first = time.process_time() - begin
    peak = peak_growth(before)
    events = sum(len(table) for table in trace.tables.values())
    del trace
    best = min(first, cpu(lambda: open_trace(file), 2 if events < 5_000_000 else 0))
    return {"events": events, "first": first, "seconds": best, "peak_bytes": peak}


def child_store(file: Path, folder: Path) -> Found:
    """Measures saving, opening (wall), and the first analysis of an opened trace."""
    import kineto_trace as kt
    from kineto_trace.store.parquet_folder import load_columns  # noqa: F401 - imports are not counted

    place = folder / "stored.kineto"
    trace = kt.open_trace(file)
    save = cpu(lambda: kt.save_trace(trace, place))
    opened = []
    for _ in range(5):
        begin = time.perf_counter()
        kt.open_trace(place)
        opened.append(time.perf_counter() - begin)
    found: Found = {"save": save, "open": min(opened), "first_open": opened[0]}
    found["bytes"] = sum(entry.stat().st_size for entry in place.iterdir())
    name = next((name for name in ("kernels", "kernel_breakdown") if name in kt.views()), None)
    if name is not None:
        found["analysis"] = name
        found["open_and_analysis"] = cpu(lambda: kt.run_view(name, kt.open_trace(place)), 2)
    shutil.rmtree(place)
    return found


def child_views(file: Path, folder: Path) -> Found:
    """Measures every view alone on columns in memory; the overview, operators and kernels together; and parts."""
    import kineto_trace as kt
    from kineto_trace.structure import activity_links

    trace = kt.open_trace(file)
    repeat = 2 if sum(len(table) for table in trace.tables.values()) < 5_000_000 else 1
    found: Found = {"views": {}, "errors": {}}

    def attempt(name: str, work: Callable[[], Any]) -> float | None:
        try:
            return cpu(work, repeat)
        except Exception as exc:
            found["errors"][name] = f"{type(exc).__name__}: {exc}"[:200]
            return None

    for name, view in kt.views().items():
        home = view.function.__module__.rpartition(".")[2]
        options = _options(name, view.options)
        seconds = attempt(name, lambda view=view, options=options: _run(view, trace, options))  # type: ignore[misc]
        if seconds is not None:
            found["views"][name] = [home, seconds]

    homes = [(view, view.function.__module__.rpartition(".")[2]) for view in kt.views().values()]
    assert {home for _, home in homes} >= set(TABLES), "a module of TABLES has no views"

    def tables() -> None:
        context = kt.Context(trace)
        for view, home in homes:
            if home in TABLES:
                view(context)

    found["tables"] = attempt("tables", tables)
    found["attribution"] = attempt("attribution", lambda: kt.Context(trace).get(activity_links.gpu))
    breakdown = next((kt.views()[name] for name in ("step_breakdown", "overview") if name in kt.views()), None)
    if breakdown is not None:
        found["breakdown"] = attempt("breakdown", lambda: breakdown(kt.Context(trace)))
    return found


def _run(view: Any, trace: Any, options: Found) -> None:
    """Runs the view; views over several traces get this one twice."""
    from kineto_trace import Context

    partial = view.partial(Context(trace), **options)
    view.combine([(0, partial), (1, partial)] if view.reduce else [(0, partial)], **options)


def _options(name: str, known: Iterable[str]) -> Found:
    options: Found = {}
    if name.startswith("critical_path"):
        options = {"annotation": "ProfilerStep", "instance": STEP}
    if name in SAME["sequences"]:
        options = {option: OPERATOR for option in ("operator", "operator_name", "name") if option in known}
    return {option: value for option, value in options.items() if option in known}


def child_report(file: Path, folder: Path) -> Found:
    """Measures the views of `kinetoctl report` without options, on columns in memory."""
    import kineto_trace as kt
    from kinetoctl.commands.report import OVERVIEW

    trace = kt.open_trace(file)
    repeat = 2 if sum(len(table) for table in trace.tables.values()) < 5_000_000 else 0

    def report() -> None:
        context = kt.Context(trace)
        for name in OVERVIEW:
            kt.run_view(name, context)

    before = resident_bytes()
    first = cpu(report)
    peak = peak_growth(before)
    return {"seconds": min(first, cpu(report, repeat)) if repeat else first, "peak_bytes": peak}


def child_export(file: Path, folder: Path) -> Found:
    """Measures writing all events as .json.gz and .pftrace."""
    import kineto_trace as kt
    import kineto_trace.formats.trace_export  # imports are not counted

    trace = kt.open_trace(file)
    found: Found = {"events": sum(len(table) for table in trace.tables.values()), "errors": {}}
    repeat = 3 if found["events"] < 5_000_000 else 1
    for suffix in ("json.gz", "json", "pftrace"):
        place = folder / f"export.{suffix}"
        try:
            times = [_timed(lambda place=place: kt.export_trace(trace, place)) for _ in range(repeat)]  # type: ignore[misc]
        except Exception as exc:
            found["errors"][suffix] = f"{type(exc).__name__}: {exc}"[:200]
            continue
        seconds, wall = min(times)
        found[suffix] = [seconds, place.stat().st_size, wall]
        place.unlink()
    return found


def child_dumps(file: Path, folder: Path) -> Found:
    """Measures json.dumps and gzip on the same events."""
    document = json.loads(gzip.open(file).read() if file.suffix == ".gz" else file.read_bytes())  # noqa: SIM115

    def write() -> None:
        with gzip.open(folder / "dumps.json.gz", "wt") as out:
            out.write(json.dumps(document))

    return {"events": len(document["traceEvents"]), "seconds": cpu(write)}


CHILDREN = {name.removeprefix("child_"): work for name, work in list(globals().items()) if name.startswith("child_")}


# ------------------------------------------------------------ the whole


def ours(part: str, file: Path, folder: Path) -> Found:
    """Runs one of our measurements."""
    command = [sys.executable, str(Path(__file__)), "--child", part, "--file", str(file), "--folder", str(folder)]
    return _answer(command)


def rival(python: Path | None, tool: str, file: Path) -> Found:
    """Runs one rival on one file. The answer is empty if the rivals have no environment."""
    if python is None and tool != "json":
        return {}
    chosen = str(python or sys.executable)
    script = str(ROOT / "tests" / "bench" / "rival_tools.py")
    return _answer([chosen, script, tool, str(file), "--step", str(STEP), "--operator", OPERATOR])


def _answer(command: list[str]) -> Found:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False)
        answer: Found = json.loads(done.stdout.splitlines()[-1])
        return answer
    except subprocess.TimeoutExpired:
        return {"load": {"error": f"not done in {CHILD_TIMEOUT_S} s"}, "error": "timeout"}
    except (IndexError, ValueError):
        text = f"exit status {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
        return {"load": {"error": text}, "error": text}


def compare(file: Path, folder: Path, rivals: Path | None, report: Report) -> None:
    """Compares all tools on one file."""
    loaded = ours("load", file, folder)
    if "error" in loaded:
        report.failed(f"{file.name}: load", loaded["error"])
        return
    events = loaded["events"]
    per = 100_000 / events
    report.heading(f"{file.name}: {events:,} events, {file.stat().st_size / 1e6:.0f} MB")
    others = {tool: rival(rivals, tool, file) for tool in ("hta", "tensorboard", "json")}
    for tool, measured in others.items():
        for name, value in measured.items():
            if isinstance(value, dict) and "error" in value:
                report.failed(f"{file.name}: {tool}: {name}", value["error"], rivals=True)
    seconds, mine = loaded["seconds"], f"{loaded['seconds'] * per:.3f} s per 100k events"
    for tool, goal in (("hta", 6.0), ("tensorboard", 0.0), ("json", 0.0)):
        theirs = _seconds(others[tool], "load")
        if theirs is not None:
            memory = others[tool].get("peak_bytes", 0) / events
            beside = f"{tool} {theirs * per:.2f} s, {memory:.0f} bytes an event"
            report.row("load: Chrome JSON to columns", mine, beside, theirs / seconds, goal)
    if events >= LARGE:
        report.limit("load", seconds * per, "s per 100k events", most=0.06)
        report.limit("load, first in its process", loaded["first"] * per, "s per 100k events", most=0.25)
        report.limit("load: peak memory", loaded["peak_bytes"] / events, "bytes an event", most=300)
    store(file, folder, report, events, _seconds(others["hta"], "load"))
    views(file, folder, report, events, others)


def store(file: Path, folder: Path, report: Report, events: int, theirs: float | None) -> None:
    """Reports on the stored form."""
    found = ours("store", file, folder)
    if "error" in found:
        report.failed(f"{file.name}: store", found["error"])
        return
    opened = f"{found['open'] * 1e3:.2f} ms wall (first {found['first_open'] * 1e3:.1f})"
    if theirs is not None:
        report.row("stored trace: open", opened, f"hta load {theirs:.2f} s", theirs / found["first_open"], 50)
    else:
        report.row("stored trace: open", opened)
    if "analysis" in found:
        analysed = found["open_and_analysis"]
        ratio = None if theirs is None else theirs / analysed
        report.row(f"stored trace: open and {found['analysis']}", f"{analysed * 1e3:.1f} ms", "hta load", ratio)
    report.row("store a trace", f"{found['save'] * 1e9 / events:.0f} ns an event, {found['bytes'] / events:.1f} bytes")


def views(file: Path, folder: Path, report: Report, events: int, others: dict[str, Found]) -> None:
    """Reports on analyses of columns in memory."""
    found = ours("views", file, folder)
    if "error" in found:
        report.failed(f"{file.name}: views", found["error"])
        return
    for name, text in found["errors"].items():  # a view may need what this file has not
        report.failed(f"{file.name}: view {name}", text, rivals="ViewError" in text)
    per = 100_000 / events
    if found.get("tables"):
        theirs = _seconds(others["tensorboard"], "views")
        if events >= LARGE:
            report.limit("overview + operators + kernels", found["tables"] * per, "s per 100k events", most=0.1)
        if theirs is not None:
            beside = f"plug-in, all views {theirs * per:.2f} s"
            report.row("the same", f"{found['tables'] * per:.3f} s per 100k events", beside, theirs / found["tables"])
    for name, what in (("breakdown", "step breakdown"), ("attribution", "ops and calls of GPU activities")):
        if found.get(name) and events >= LARGE:
            report.limit(what, events / found[name] / 1e6, "M events/s", least=5)
    for name, candidates in SAME.items():
        mine = next((found["views"][view] for view in candidates if view in found["views"]), None)
        theirs = _seconds(others["hta"], name)
        if mine is not None and theirs is not None:
            text = f"{mine[1] * 1e3:.1f} ms"
            goal = GOALS.get(name, 0) if events >= LARGE else 0
            report.row(name, text, f"hta {theirs * 1e3:.0f} ms", theirs / mine[1], goal)
    slowest = sorted(found["views"].items(), key=lambda entry: -entry[1][1])
    listed = ", ".join(f"{name} {seconds * per * 1e3:.1f}" for name, (_, seconds) in slowest[:12])
    report.row("slowest views alone, ms per 100k events", listed)


def linear(files: list[tuple[int, Path]], folder: Path, report: Report) -> None:
    """Reports the same figures for traces of several sizes."""
    report.heading("linear: CPU ns an event")
    rows: dict[str, list[str]] = {}
    for _, file in files:
        loaded, found, out, told = (ours(part, file, folder) for part in ("load", "views", "export", "report"))
        stored = ours("store", file, folder)
        events = loaded.get("events", 0)
        if not events:
            report.failed(f"{file.name}: load", loaded.get("error", ""))
            continue
        entries: dict[str, Any] = {
            "load": loaded["seconds"],
            "memory of loading, bytes": loaded["peak_bytes"] / 1e9,
            "store": stored.get("save"),
            "overview + operators + kernels": found.get("tables"),
            "default report": told.get("seconds"),
            "memory of the default report, bytes": told.get("peak_bytes", 0) / 1e9,
            "step breakdown": found.get("breakdown"),
            "attribution": found.get("attribution"),
            "export .json.gz": out.get("json.gz", [None])[0],
            "export .pftrace": out.get("pftrace", [None])[0],
        }
        for what, seconds in entries.items():
            rows.setdefault(what, []).append("-" if seconds is None else f"{seconds * 1e9 / events:.0f}")
        rows.setdefault("open a stored trace, ms wall", []).append(f"{stored.get('open', 0) * 1e3:.2f}")
        if told.get("seconds") and 500_000 <= events <= 2_000_000:
            report.limit("default report of 1 M events", told["seconds"] * 1e6 / events, "s", most=1)
        for name, text in (out.get("errors") or {}).items():
            report.failed(f"{file.name}: export {name}", text)
    sizes = " / ".join(f"{count / 1e6:g} M" for count, _ in files)
    for what, values in rows.items():
        report.row(f"{what} ({sizes})", " / ".join(values))


def exports(file: Path, small: Path, folder: Path, report: Report) -> None:
    """Reports on writing, compared with json.dumps and gzip."""
    found, dumps = ours("export", file, folder), ours("dumps", small, folder)
    report.heading(f"export of {found.get('events', 0):,} events")
    for name, text in (found.get("errors") or {"export": found["error"]} if "error" in found else {}).items():
        report.failed(f"export {name}", text)
    if "seconds" not in dumps:
        report.failed("json.dumps + gzip", dumps.get("error", ""))
        return
    each = dumps["seconds"] / dumps["events"]
    for suffix, goal in (("json.gz", 40.0), ("json", 0.0), ("pftrace", 40.0)):
        if suffix in found:
            seconds, size, wall = found[suffix]
            mine = seconds / found["events"]
            text = f"{mine * 1e9:.0f} ns an event, {size / 1e6:.0f} MB, {wall:.2f} s wall"
            report.row(f".{suffix}", text, f"json.dumps + gzip {each * 1e9:.0f} ns", each / mine, goal)


def _seconds(found: Found, name: str) -> float | None:
    value = found.get(name)
    return value.get("seconds") if isinstance(value, dict) else None


def make(events: int, folder: Path) -> Path:
    """Makes a synthetic trace; small ones are compressed, as people usually have them."""
    file = folder / f"synthetic-{events}.json"
    with file.open("w") as out:
        synthetic.write(out, events, layers=LAYERS)
    return file


def main() -> int:
    """Runs the benchmark. Exit status 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--events", type=int, nargs="*", default=[100_000, 1_000_000, 10_000_000])
    parser.add_argument("--rival-events", type=int, default=200_000)
    parser.add_argument("--rivals", type=Path, default=ROOT / ".venv-analysers" / "bin" / "python")
    parser.add_argument("--file", type=Path, nargs="*", default=[])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--child", choices=list(CHILDREN))
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child](options.file[0], options.folder)))
        return 0
    rivals = options.rivals if options.rivals.exists() else None
    report = Report()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        files = [(count, make(count, folder)) for count in sorted(options.events)]
        for file in [file for count, file in files if count <= options.rival_events] + options.file:
            compare(file, folder, rivals, report)
        if files:
            export = max((entry for entry in files if entry[0] <= 2_000_000), default=files[0])
            exports(export[1], files[0][1], folder, report)
            linear(files, folder, report)
    print("\n" + "\n".join(f"- failed: {text}" for text in report.failures))
    print(f"{report.missed} goals missed or not measured" + ("" if rivals else "; no rivals: make bench-traces"))
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
