"""The critical path drawn into a trace, and HTA's figures for recorded traces."""

import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.analysis.critical_path.critical_path_drawing import TRACK, overlay
from kineto_trace.analysis.critical_path.critical_path_views import critical_path_breakdown
from kineto_trace.formats.chrome.chrome_reader import load_chrome
from kineto_trace.formats.trace_export import export_trace
from kineto_trace.model.context import Context
from kineto_trace.model.trace import Trace
from kineto_trace.view_api.view import Compat
from support.trace_files import traces
from support.trace_files.h200 import recording
from support.trace_files.ranks import context, event, launched, step

EVENTS = [
    step(1, 0, 60),
    event("cpu_op", "aten::mm", 0, 20, **{"External id": 1}),
    event("cpu_op", "aten::relu", 25, 5, **{"External id": 2}),
    *launched("gemm", 5, 15, 60, 1),
]


def exported(trace: Trace, folder: Path) -> list[dict[str, Any]]:
    path = folder / "trace.json"
    export_trace(trace, path)
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def test_the_path_is_a_track_of_its_own_in_a_file(tmp_path: Path) -> None:
    events = exported(overlay(context(EVENTS)), tmp_path)
    slices = [row for row in events if row.get("cat") == "critical_path" and row["ph"] == "X"]
    assert [(row["name"], row["ts"], row["dur"]) for row in slices] == [
        ("cpu_bound: aten::mm", 0, 5),
        ("gpu_kernel_launch_overhead: gemm", 5, 10),
        ("gpu_compute_bound: gemm", 15, 60),
    ]
    named = [row for row in events if row["name"] == "thread_name" and row["tid"] == slices[0]["tid"]]
    assert named[0]["args"] == {"name": TRACK}


def test_events_on_the_path_are_marked_and_joined_by_arrows(tmp_path: Path) -> None:
    events = exported(overlay(context(EVENTS)), tmp_path)
    assert [row["name"] for row in events if row.get("args", {}).get("critical") and row["ph"] == "X"] == [
        "aten::mm",
        "cudaLaunchKernel",
        "gemm",
    ]
    arrows = [row for row in events if row.get("cat") == "critical_path" and row["ph"] in "sf"]
    assert [(row["ph"], row["pid"], row["tid"], row["ts"], row["args"]["type"]) for row in arrows] == [
        ("s", 1, 1, 5, "critical_path_kernel_launch_delay"),
        ("f", 0, 7, 15, "critical_path_kernel_launch_delay"),
    ]


def test_what_is_not_on_the_path_can_be_left_out(tmp_path: Path) -> None:
    events = exported(overlay(context(EVENTS), only_critical=True), tmp_path)
    assert "aten::relu" not in {row["name"] for row in events}
    assert {"aten::mm", "cudaLaunchKernel", "gemm", "ProfilerStep#1"} <= {row["name"] for row in events}


def test_the_path_is_a_track_of_annotations_in_a_capture(tmp_path: Path) -> None:
    op = {"name": "aten::mm", "duration": 20_000, "thread": 1, "finished": 1, "inputs": -1, "id": 1}
    trace = overlay(Context(traces.trace({"cpu_op": [op]})), annotation="")
    events = exported(trace, tmp_path)
    assert [(row["name"], row["dur"]) for row in events if row.get("cat") == "user_annotation"] == [
        ("cpu_bound: aten::mm", 20)
    ]
    assert TRACK in trace.target.threads.values()


# Made with HTA 0.6.1: critical_path_analysis(0, "", None), durations by bound_by
HTA_FIGURES = {
    "mlp-cupti130001": {"cpu_bound": 7330.0},
    "streams-cupti130001": {
        "cpu_bound": 3692.0,
        "gpu_compute_bound": 135.0,
        "gpu_kernel_kernel_overhead": 36.0,
        "gpu_kernel_launch_overhead": 9.0,
    },
    "graph-cupti130001": {
        "gpu_kernel_kernel_overhead": 1463.0,
        "cpu_bound": 186.0,
        "gpu_compute_bound": 73.0,
        "gpu_kernel_launch_overhead": 31.0,
    },
}


@pytest.mark.parametrize("name", HTA_FIGURES)
def test_hta_finds_the_same_in_recorded_traces(name: str) -> None:
    text = json.dumps(recording(name).kineto).encode()
    found = critical_path_breakdown(Context(load_chrome(BytesIO(text))), annotation="", compat=Compat.HTA)
    assert {row["bound_by"]: row["time_us"] for row in found.rows()} == HTA_FIGURES[name]
