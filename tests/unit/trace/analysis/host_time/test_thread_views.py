"""What threads did on CPUs, by the kernel's counters: in every form of a trace, and never more than was recorded.

Settings reach the view in every form of a trace, and only what is known to cost time is judged."""

from pathlib import Path
from typing import Any

import pytest
from kineto_trace.analysis.host_time.cpu_shortage import share_without_cpu
from kineto_trace.analysis.host_time.thread_views import (
    MAY_SLOW,
    RULES,
    SLOWS,
    SettingFacts,
    verdict,
)
from kineto_trace.catalog.view_runner import run_view
from kineto_trace.conversion.target_conversion import convert_target
from kineto_trace.errors import ViewError
from kineto_trace.model.context import Context
from kineto_trace.model.kernel_counters import PROCESS
from kineto_trace.model.trace import Trace
from kineto_trace.open.trace_opener import open_trace
from support.agent.stack_records import (
    IDLE,
    PERIOD_NS,
    RUNNING,
    Sample,
    code,
    linetable,
    node,
    recording,
    write_recording,
)
from support.agent.stack_records import write_recording as write
from support.trace_files.traces import START_NS, target
from support.trace_files.traces import trace as made_trace

MAIN, POOL, SHORT = 7, 8, 9
MS = 1_000_000
END_NS = START_NS + 200 * MS
GIVEN: dict[str, Any] = {
    "torch.version": "2.13.0", "torch.num_threads": 8, "torch.deterministic_algorithms": True,
    "torch.anomaly_mode": False, "python.usable_cores": 2, "env.CUDA_LAUNCH_BLOCKING": "1", "env.NCCL_DEBUG": "INFO",
}  # fmt: skip


def counters(**changed: Any) -> dict[str, Any]:
    """Two intervals of 100 ms. MAIN runs for 80 and 60 ms; POOL waits for a CPU for 50 ms and runs for 10."""
    process = {name: [0, 0] for name in PROCESS} | {
        "cpu_ns": [90 * MS, 60 * MS], "host_busy_ns": [190 * MS, 160 * MS], "major_faults": [1, 1],
        "read_bytes": [-1, -1], "written_bytes": [1000, 3000],
    }  # fmt: skip
    given: dict[str, Any] = {
        "times": [START_NS, START_NS + 100 * MS, END_NS],
        "rows": {
            "interval": [0, 0, 1], "thread": [MAIN, POOL, MAIN], "cpu_ns": [80 * MS, 10 * MS, 60 * MS],
            "wait_ns": [0, 50 * MS, 10 * MS], "switches": [3, 9, 4],
        },
        "events": {"thread": [MAIN], "voluntary_switches": [5], "involuntary_switches": [2], "minor_faults": [40],
                   "major_faults": [2]},
        "lives": {"thread": [], "first_ns": [], "last_ns": []},
        "process": process,
        "children": {"pid": [50, 51], "first_ns": [START_NS] * 2, "last_ns": [START_NS + 100 * MS, END_NS],
                     "cpu_ns": [10 * MS, 190 * MS], "wait_ns": [5 * MS, 2 * MS], "major_faults": [2, 0],
                     "read_bytes": [-1, 400]},
        "child_names": ["worker a", "worker b"],
        "host_cores": 4,
        "usable_cores": 2,
        "quota_cores": 0.0,
        "quota_group": "",
        "notes": [],
    }  # fmt: skip
    return given | changed


def converted(folder: Path, **changed: Any) -> Path:
    folder.mkdir(exist_ok=True)
    info = target(window_start_ns=START_NS, window_end_ns=END_NS, complete=True, kernel_counters=counters(**changed))
    info.write(folder)
    codes = {1: code(10, "t.py", "train", kind=10, table=linetable(11, first_line=10))}
    samples = [Sample(START_NS + tick * PERIOD_NS, MAIN, 1, RUNNING, 7_000) for tick in range(20)]
    samples.append(Sample(START_NS, SHORT, 1, IDLE, 1_000))
    names = {MAIN: b"MainThread", POOL: b"pool", SHORT: b"short"}
    write(folder, recording(samples, codes=codes, nodes={1: node(0, 1, 0)}, threads=names))
    convert_target(folder, formats=["chrome", "perfetto"])
    return folder


@pytest.fixture(scope="module", params=["columns", "trace.json.gz", "trace.pftrace"])
def trace(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Trace:
    return open_trace(converted(tmp_path_factory.mktemp("capture")) / request.param)


def rows(trace: Trace, view: str, *names: str, **options: Any) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in run_view(view, trace, **options).rows()]


def test_running_waiting_for_a_cpu_and_blocked_are_the_whole_time(trace: Trace) -> None:
    shown = ("thread", "name", "cpu_pct", "cpu_wait_pct", "blocked_pct", "samples")
    assert rows(trace, "threads", *shown) == [
        (MAIN, "MainThread", 70.0, 5.0, 25.0, 20),
        (POOL, "pool", 5.0, 25.0, 70.0, None),
        (SHORT, "short", 0.5, None, None, 1),
    ]


def test_a_thread_that_lived_for_a_part_of_the_trace_was_not_blocked_in_the_rest(tmp_path: Path) -> None:
    lives = {"thread": [MAIN], "first_ns": [START_NS + 90 * MS], "last_ns": [END_NS]}
    part = {"thread": [MAIN], "cpu_ns": [60 * MS], "wait_ns": [20 * MS], "switches": [1]}
    found = [{**part, "interval": [0]}, {**part, "interval": [1]}]
    trace = open_trace(converted(tmp_path, lives=lives, rows=found[1]) / "columns")
    assert rows(trace, "threads", "name", "cpu_pct", "cpu_wait_pct", "blocked_pct")[0] == ("MainThread", 30, 10, 15)
    assert rows(trace, "thread_times", "blocked_pct") == [(20.0,)]
    trace = open_trace(converted(tmp_path / "first", lives=lives, rows=found[0]) / "columns")
    assert rows(trace, "thread_times", "cpu_pct", "blocked_pct") == [(60.0, None)]


def test_a_thread_that_had_ended_has_no_switches_and_faults(trace: Trace) -> None:
    shown = ("thread", "voluntary_switches", "involuntary_switches", "minor_faults", "major_faults")
    assert rows(trace, "threads", *shown)[:2] == [(MAIN, 5, 2, 40, 2), (POOL, None, None, None, None)]


def test_threads_over_time(trace: Trace) -> None:
    assert rows(trace, "thread_times", "start_us", "name", "cpu_pct", "cpu_wait_pct", "blocked_pct", thread="Main") == [
        (0.0, "MainThread", 80.0, 0.0, 20.0),
        (100_000.0, "MainThread", 60.0, 10.0, 30.0),
    ]
    with pytest.raises(ViewError, match="no thread that ran has 'x' in its name"):
        run_view("thread_times", trace, thread="x")


def test_what_the_process_used_and_what_is_unknown(trace: Trace) -> None:
    shown = ("seconds", "cpu_cores", "cpu_wait_cores", "usable_cores", "host_cores", "quota_cores", "throttled_pct")
    assert rows(trace, "process_use", *shown) == [(0.2, 0.75, 0.3, 2, 4, None, None)]
    more = ("other_cores", "major_faults", "read_bytes", "written_bytes")
    assert rows(trace, "process_use", *more) == [(1.0, 10.0, None, 20_000.0)]


def test_child_processes_have_shares_of_the_time_in_which_they_were_seen(trace: Trace) -> None:
    shown = ("pid", "name", "seconds", "cpu_pct", "cpu_wait_pct", "major_faults", "read_bytes")
    assert rows(trace, "child_processes", *shown) == [
        (51, "worker b", 0.2, 95.0, 1.0, 0.0, 2000.0),
        (50, "worker a", 0.1, 10.0, 5.0, 20.0, None),
    ]


def test_waiting_for_cpus_is_noted(trace: Trace) -> None:
    (note,) = run_view("process_use", trace).notes
    assert note == (
        "threads waited for a CPU for 29 % of the time in which they were ready to run: counting other "
        "processes, more threads were ready than 2 usable cores could run"
    )


def test_throttling_by_a_quota_is_noted(tmp_path: Path) -> None:
    process = counters()["process"] | {"quota_periods": [1, 3], "throttled_periods": [0, 3]}
    folder = converted(tmp_path, process=process, quota_cores=1.5, quota_group="/jobs/one")
    found = run_view("threads", open_trace(folder / "columns"))
    assert found.notes[0] == (
        "the CPU quota of the control group /jobs/one (1.5 cores) was used up in 75 % of its periods: "
        "its threads then stop until the next period"
    )


def test_counters_of_a_part_of_the_trace_are_noted(tmp_path: Path) -> None:
    folder = converted(tmp_path, times=[START_NS + 50 * MS, START_NS + 100 * MS, END_NS])
    assert run_view("thread_times", open_trace(folder / "columns")).notes == (
        "the Linux kernel's counters cover 75 % of the trace; their shares refer to that time",
    )


@pytest.mark.parametrize("view", ["thread_times", "process_use", "child_processes"])
def test_a_trace_without_counters_says_so(tmp_path: Path, view: str) -> None:
    found = run_view(view, open_trace(converted(tmp_path, times=[]) / "columns"))
    assert (list(found.rows()), found.notes) == (
        [],
        ("the Linux kernel's counters are not in this trace: kinetod records them, other tools do not",),
    )


@pytest.mark.parametrize(
    ("wait_ms", "share"),
    [(0, 0.0), (20, 0.0), (60, pytest.approx(60 / 200))],  # beside 140 ms of CPU time in 200 ms
)
def test_launching_threads_without_a_cpu_are_told_from_a_quarter_of_the_time_that_they_wanted(
    wait_ms: int, share: float
) -> None:
    rows = {
        "interval": [0, 0, 1], "thread": [MAIN, POOL, MAIN], "cpu_ns": [80 * MS, 10 * MS, 60 * MS],
        "wait_ns": [wait_ms * MS, 50 * MS, 0], "switches": [3, 9, 4],
    }  # fmt: skip
    launches = {"cuda_runtime": [{"name": "cudaLaunchKernel", "start": 0, "duration": 1, "thread": MAIN}]}
    made = made_trace(launches, target=target(kernel_counters=counters(rows=rows)))
    assert share_without_cpu(Context(made)) == share


def test_the_time_without_a_cpu_is_unknown_without_counters() -> None:
    assert share_without_cpu(Context(made_trace({}))) == 0.0


@pytest.mark.parametrize("form", ["columns", "trace.json.gz", "trace.pftrace"])
def test_settings_that_cost_time_come_first(tmp_path: Path, form: str) -> None:
    end = START_NS + PERIOD_NS
    target(window_start_ns=START_NS, window_end_ns=end, complete=True, settings=GIVEN).write(tmp_path)
    codes = {1: code(10, "t.py", "train", kind=10, table=linetable(11, first_line=10))}
    write_recording(tmp_path, recording([Sample(START_NS, 7, 1, RUNNING)], codes=codes, nodes={1: node(0, 1, 0)}))
    convert_target(tmp_path, formats=["chrome", "perfetto"])
    trace = open_trace(tmp_path / form)
    assert trace.target.settings == GIVEN
    found = run_view("settings", trace)
    assert [(row["setting"], row["value"], row["effect"]) for row in found.rows()] == [
        ("env.CUDA_LAUNCH_BLOCKING", "1", "slows"),
        ("torch.num_threads", "8", "slows"),
        ("torch.deterministic_algorithms", "True", "may slow"),
        ("env.NCCL_DEBUG", "INFO", None),
        ("python.usable_cores", "2", None),
        ("torch.anomaly_mode", "False", None),
        ("torch.version", "2.13.0", None),
    ]
    judgement = list(found.rows())[1]["judgement"]
    assert judgement == "operators on the CPU use 8 threads on 2 usable cores, so the threads take turns"


def facts(*, cores: int = 8, on_gpu: bool = True, tf32: bool | None = True, convolves: bool = True) -> SettingFacts:
    return SettingFacts({"python.usable_cores": cores}, on_gpu, tf32, convolves)


@pytest.mark.parametrize(("name", "value", "given", "effect"), [
    ("torch.num_threads", 8, facts(), None),
    ("torch.num_threads", 1, facts(), None),
    ("torch.num_threads", 1, facts(on_gpu=False), MAY_SLOW),
    ("torch.matmul_precision", "none", facts(), MAY_SLOW),
    ("torch.matmul_precision", "tf32", facts(), None),
    ("torch.matmul_precision", "none", facts(tf32=False), None),  # a V100 has no TF32
    ("torch.matmul_precision", "none", facts(tf32=None), None),
    ("torch.cudnn_benchmark", False, facts(), MAY_SLOW),
    ("torch.cudnn_benchmark", False, facts(convolves=False), None),
    ("torch.cudnn_benchmark", True, facts(), None),
    ("torch.cudnn_enabled", False, facts(), MAY_SLOW),
    ("dynamo.recompiles", 3, facts(), MAY_SLOW),
    ("dynamo.recompiles", 0, facts(), None),
    ("python.monitoring_tools", "coverage", facts(), SLOWS),
    ("python.monitoring_tools", "", facts(), None),
    ("env.CUDA_LAUNCH_BLOCKING", "0", facts(), None),
    ("env.TORCH_DISTRIBUTED_DEBUG", "DETAIL", facts(), SLOWS),
    ("env.TORCH_DISTRIBUTED_DEBUG", "INFO", facts(), None),
    ("env.PYTORCH_JIT", "0", facts(), MAY_SLOW),
    ("optimizer.AdamW.implementation", "for-loop", facts(), MAY_SLOW),
    ("optimizer.AdamW.implementation", "default", facts(), None),
    ("optimizer.AdamW.implementation", "default", facts(on_gpu=False), MAY_SLOW),
    ("optimizer.AdamW.implementation", "fused", facts(on_gpu=False), None),
    ("optimizer.AdamW.parameters", 300, facts(on_gpu=False), None),
    ("env.UNKNOWN", "1", facts(), None),
])  # fmt: skip
def test_a_value_is_judged_by_what_it_does_here(name: str, value: Any, given: SettingFacts, effect: str | None) -> None:
    found = verdict(name, value, given)
    assert (found.effect if found is not None else None) == effect


@pytest.mark.parametrize("value", [True, False, 0, 1, -5, 3.5, "", "x", "1", "0"])
def test_no_value_of_any_setting_fails(value: Any) -> None:
    assert all(verdict(name, value, facts()) is None or verdict(name, value, facts()) for name in RULES)


def test_a_trace_without_settings_says_so(tmp_path: Path) -> None:
    target(window_start_ns=START_NS, window_end_ns=START_NS + 1, complete=True).write(tmp_path)
    write_recording(tmp_path, recording([], codes={}, nodes={}))
    convert_target(tmp_path, formats=["chrome"])
    assert run_view("settings", open_trace(tmp_path / "columns")).notes == (
        "the program's settings are not in this trace: kinetod records them, other tools do not",
    )
