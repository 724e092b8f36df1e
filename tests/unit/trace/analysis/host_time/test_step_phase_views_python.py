"""Sampled Python in the views, files and summary: idle threads never lead, lines and states reach every reader."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from kineto_agent.protocol.records import WAIT_CPU, WAIT_LOCK, WAIT_SLEEP
from kineto_trace.catalog.view_runner import run_view
from kineto_trace.conversion.target_conversion import convert_target
from kineto_trace.errors import ViewError
from kineto_trace.formats.flame_graphs import FlameGraph, folded, stacks
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.open.trace_opener import open_trace
from support.agent.stack_records import (
    HAS_GIL,
    IDLE,
    PERIOD_NS,
    RUNNING,
    WAITING,
    Sample,
    code,
    linetable,
    node,
    recording,
    write_recording,
)
from support.trace_files.perfetto_traces import trace_processor
from support.trace_files.traces import START_NS, target
from support.trace_files.traces import trace as made

CODES = {
    1: code(10, "t.py", "train", kind=10, table=linetable(11, 12, first_line=10)),
    2: code(1, "threading.py", "wait", kind=10, table=linetable(5, first_line=1)),
}
NODES = {1: node(0, 1, 0), 2: node(0, 1, 2), 3: node(0, 2, 0)}
MAIN, IDLER, NATIVE = 7, 8, 9
THREADS = {MAIN: b"MainThread", IDLER: b"wait_for_end", NATIVE: b"pt_autograd_0"}


def samples(start_ns: int = START_NS) -> list[Sample]:
    """Ten ticks: train runs line 11 twice, line 12 six times and waits twice; one thread waits, one has no Python."""
    found = []
    for tick in range(10):
        now = start_ns + tick * PERIOD_NS
        state = WAITING if tick > 7 else RUNNING
        found += [
            Sample(now, MAIN, 1 if tick < 2 else 2, state, 9_000),
            Sample(now + 1000, IDLER, 3, IDLE),
            Sample(now + 2000, NATIVE, 0, RUNNING, 5_000),
        ]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("capture")
    end = START_NS + 10 * PERIOD_NS
    target(window_start_ns=START_NS, window_end_ns=end, complete=True).write(path)
    write_recording(path, recording(samples(), codes=CODES, nodes=NODES, threads=THREADS))
    convert_target(path, formats=["chrome", "perfetto"])
    return path


@pytest.fixture(scope="module", params=["columns", "trace.json.gz", "trace.pftrace"])
def trace(folder: Path, request: pytest.FixtureRequest) -> Trace:
    return open_trace(folder / request.param)


def rows(trace: Trace, view: str, *names: str, **options: Any) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in run_view(view, trace, **options).rows()]


def test_what_ran_comes_first_by_line_and_idle_threads_last(trace: Trace) -> None:
    shown = ("function", "line", "running", "running_pct", "running_us", "waiting", "idle", "threads")
    assert rows(trace, "python_samples", *shown) == [
        ("t.py(10): train", 12, 6, 75.0, 60_000.0, 2, 0, 1),
        ("t.py(10): train", 11, 2, 25.0, 20_000.0, 0, 0, 1),
        ("threading.py(1): wait", 5, 0, 0.0, 0.0, 0, 10, 1),
    ]


def test_by_function_the_hottest_line_and_all_lines_are_told(trace: Trace) -> None:
    assert rows(trace, "python_samples", "function", "line", "running", "lines", by="function", idle=False) == [
        ("t.py(10): train", 12, 8, "12: 6 running, 2 waiting; 11: 2 running")
    ]


def test_samples_of_one_thread_alone(trace: Trace) -> None:
    assert rows(trace, "python_samples", "function", thread="wait_for") == [("threading.py(1): wait",)]


def test_idle_code_says_what_it_waits_for_and_who_called_it(tmp_path: Path) -> None:
    lock, sleep = IDLE | WAIT_LOCK << 16, IDLE | WAIT_SLEEP << 16
    states = [lock] * 5 + [sleep] * 2 + [RUNNING, RUNNING | WAIT_CPU << 16]
    stacks_ = {1: NODES[1], 2: NODES[2], 3: node(1, 2, 0), 4: node(2, 2, 0)}
    found = [
        Sample(START_NS + tick * PERIOD_NS, MAIN, 3 if tick < 3 else 4, state) for tick, state in enumerate(states)
    ]
    target(window_start_ns=START_NS, window_end_ns=START_NS + 9 * PERIOD_NS, complete=True).write(tmp_path)
    write_recording(tmp_path, recording(found, codes=CODES, nodes=stacks_, threads=THREADS))
    convert_target(tmp_path, formats=["chrome", "perfetto"])
    for form in ("columns", "trace.json.gz", "trace.pftrace"):
        trace = open_trace(tmp_path / form)
        assert rows(trace, "python_samples", "function", "idle", "idle_for", "caller") == [
            ("threading.py(1): wait", 7, "lock 5, sleep 2", "t.py(10): train, line 12"),
        ]
        assert rows(trace, "python_samples", "idle_for", "caller", by="function") == [
            ("lock 5, sleep 2", "t.py(10): train, line 12"),
        ]
        assert rows(trace, "threads", "idle", "idle_for") == [(7, "lock 5, sleep 2")]
        table = trace.table("python_function")
        assert sorted(table["call_line"].tolist()) == [0, 11, 12]
        assert (int(table["ready"].sum()), int(table["running"].sum())) == (1, 2)


def test_a_slice_that_was_idle_at_two_lines_does_not_say_which_waited_for_what(tmp_path: Path) -> None:
    found = [Sample(START_NS + tick * PERIOD_NS, MAIN, 1 + tick % 2, IDLE | WAIT_LOCK << 16) for tick in range(4)]
    target(window_start_ns=START_NS, window_end_ns=START_NS + 4 * PERIOD_NS, complete=True).write(tmp_path)
    write_recording(tmp_path, recording(found, codes=CODES, nodes=NODES, threads=THREADS))
    convert_target(tmp_path, formats=["chrome"])
    trace = open_trace(tmp_path / "columns")
    assert rows(trace, "python_samples", "line", "idle", "idle_for") == [(11, 2, None), (12, 2, None)]
    assert rows(trace, "python_samples", "idle", "idle_for", by="function") == [(4, "lock 4")]


def test_who_holds_the_gil_while_code_waits_is_named(tmp_path: Path) -> None:
    found = [
        sample
        for tick in range(5)
        for sample in (
            Sample(START_NS + tick * PERIOD_NS, MAIN, 1, WAITING),
            Sample(START_NS + tick * PERIOD_NS, IDLER, 3, RUNNING | HAS_GIL),
        )
    ]
    target(window_start_ns=START_NS, window_end_ns=START_NS + 5 * PERIOD_NS, complete=True).write(tmp_path)
    write_recording(tmp_path, recording(found, codes=CODES, nodes=NODES, threads=THREADS))
    convert_target(tmp_path, formats=["chrome", "perfetto"])
    for form in ("columns", "trace.json.gz", "trace.pftrace"):
        assert rows(open_trace(tmp_path / form), "python_samples", "function", "waiting", "gil_holder") == [
            ("threading.py(1): wait", 0, None),
            ("t.py(10): train", 5, "wait_for_end"),
        ]


def test_an_unknown_grouping_is_refused(trace: Trace) -> None:
    with pytest.raises(ViewError, match="by='file' is not valid; use one of function, line"):
        run_view("python_samples", trace, by="file")


def test_threads_without_python_are_there_with_name_and_share(trace: Trace) -> None:
    shown = ("thread", "name", "python", "cpu_pct", "samples", "running", "waiting", "idle")
    found = [
        tuple(round(value, 1) if isinstance(value, float) else value for value in row)
        for row in rows(trace, "threads", *shown)
    ]
    assert found == [
        (MAIN, "MainThread", True, 90.0, 10, 8, 2, 0),
        (NATIVE, "pt_autograd_0", False, 50.0, 10, 10, 0, 0),
        (IDLER, "wait_for_end", True, 0.0, 10, 0, 0, 10),
    ]


def test_flame_graphs_have_lines_and_leave_idle_samples_to_a_graph_of_their_own(trace: Trace) -> None:
    def lines(graph: FlameGraph) -> set[str]:
        return set(folded(stacks(Context(trace), graph)).decode().splitlines())

    main = "thread 7 (MainThread);t.py(10): train"
    assert lines(FlameGraph.SAMPLES) == {
        f"{main};line 11 2",
        f"{main};line 12 6",
        f"{main};line 12;waiting for the GIL 2",
    }
    assert lines(FlameGraph.IDLE) == {"thread 8 (wait_for_end);threading.py(1): wait;line 5 10"}


def test_the_file_tells_lines_states_and_names_to_any_viewer(folder: Path) -> None:
    events = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]
    [train] = [event["args"] for event in events if event["name"] == "t.py(10): train"]
    assert train == {
        "Python id": 1,
        "Python parent id": None,
        "Python thread": MAIN,
        "samples": 10,
        "self samples": 10,
        "running samples": 8,
        "samples waiting for the GIL": 2,
        "line": 12,
        "lines": "12: 6 running, 2 waiting; 11: 2 running",
    }
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {
        MAIN: "thread 7 (MainThread)",
        IDLER: "thread 8 (wait_for_end)",
        NATIVE: "thread 9 (pt_autograd_0)",
    }


@pytest.mark.parametrize("name", [pytest.param("trace.json.gz", marks=pytest.mark.slow), "trace.pftrace"])
def test_perfetto_reads_lines_and_states(folder: Path, name: str) -> None:
    arguments, lost = trace_processor.query(
        folder / name,
        "select a.key, a.display_value as value from slice s join args a using (arg_set_id) "
        "where s.name like '%train' and (a.key like '%line%' or a.key like '%running%') order by 1",
        "select name from stats where severity = 'error' and value > 0",
    )
    assert [(row["key"].rpartition(".")[2], row["value"]) for row in arguments] == [
        ("line", "12"),
        ("lines", "12: 6 running, 2 waiting; 11: 2 running"),
        ("running samples", "8"),
    ]
    assert lost == []


def test_the_summary_ranks_what_ran_and_says_what_was_idle(folder: Path) -> None:
    summary = convert_target(folder, formats=[]).summary
    assert summary["top_functions"] == [
        {
            "name": "t.py(10): train",
            "count": 8,
            "total_ns": 80_000_000,
            "waiting": 2,
            "lines": [{"line": 12, "count": 6}, {"line": 11, "count": 2}],
        }
    ]
    assert summary["python_samples"] == {"unknown": 0, "running": 8, "waiting": 2, "idle": 10}
    assert summary["native_threads"] == [
        {"thread": NATIVE, "name": "pt_autograd_0", "cpu_ns": 50_000_000, "cpu_fraction": 0.5}
    ]


def test_samples_of_older_captures_are_not_called_idle_or_running() -> None:

    value = made({"python_function": [{"name": "f", "samples": 2, "self_samples": 2}]}, sample_period_ns=PERIOD_NS)
    result = run_view("python_samples", value)
    assert [(row["running"], row["idle"]) for row in result.rows()] == [(2, 0)]
    assert result.notes == (
        "these samples do not record whether their threads were running, so they include idle threads",
    )


def test_a_trace_of_the_gpu_alone_says_so() -> None:

    assert run_view("python_samples", made({})).notes == ("the trace has no samples of Python stacks",)
    assert len(run_view("threads", made({}))) == 0
