"""What was recorded: process, machine, versions and window."""

from typing import Any

from kineto_trace.analysis.overview.recording_views import recordings
from kineto_trace.model.context import Context
from support.trace_files.traces import START_NS, target, trace


def row(**changes: Any) -> dict[str, Any]:
    (found,) = recordings(Context(trace({}, **changes))).rows()
    return found


def test_a_recording_names_its_process_machine_versions_and_window() -> None:
    of = target(
        rank=3, world_size=8, command=["python", "train.py"], job_id="4242", labels={"job": "7", "by": "me"},
        framework="torch 2.11.0", python_version="3.12.3",
    )  # fmt: skip
    found = row(
        target=of, devices=({"name": "NVIDIA H200"}, {"id": 1}), head={"kinetod": '{"version": "0.1.0"}'},
        versions={"cuda_runtime_version": 13020, "cuda_driver_version": 13000, "cupti_version": 130001},
    )  # fmt: skip
    assert found == {
        "rank": 3, "world_size": 8, "host": "host", "process": "python", "pid": 4242, "command": "python train.py",
        "job": "4242", "labels": ["by=me", "job=7"], "gpus": ["NVIDIA H200"],
        "framework": "torch 2.11.0", "python": "3.12.3", "cuda": "13.2",
        "driver_cuda": "13.0", "cupti": "130001", "kinetod": "0.1.0", "capture": "cap",
        "start_ns": START_NS, "length_us": 1000.0,
    }  # fmt: skip


def test_what_a_trace_does_not_have_is_missing() -> None:
    found = row(target=target(host="", capture_id="", pid=0, process_name=""), head={"kinetod": '"x"'},
                window_start_ns=0, window_end_ns=0)  # fmt: skip
    assert {name for name, value in found.items() if value is not None} == {"rank"}
