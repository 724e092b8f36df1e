"""A real capture tells how its process got on with the CPUs, and what it was set to."""

import os
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kineto_trace.catalog.view_runner import run_view
from kineto_trace.open.trace_opener import open_trace
from support.machine.control_groups import cpu_group
from support.service.daemon import Daemon, watch_to_end
from support.targets.programs import connected
from support.waiting import scaled

SECOND_NS = 10**9
VIEWS = ("threads", "process_use", "thread_times", "child_processes", "settings")
# Two threads, of which one computes without the GIL all the time and the other one waits for its standard input.
TARGET = """
import hashlib, os, subprocess, sys, threading, kineto_agent
os.environ.update(CUDA_LAUNCH_BLOCKING="1", HF_TOKEN="secret")
kineto_agent.start()
data = bytes(10_000_000)
def compute():
    while True:
        hashlib.sha256(data)
threading.Thread(target=compute, name="computes", daemon=True).start()
worker = "import hashlib, os, sys, threading; data = bytes(10_000_000)"
worker += "; threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()"
worker += chr(10) + "while True: hashlib.sha256(data)"
child = subprocess.Popen([sys.executable, "-c", worker], stdin=subprocess.PIPE)  # it ends with this process
print("ready", flush=True)
sys.stdin.read()
"""


def traced(daemon: Daemon, pid: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The views' rows of a capture, by view."""
    stub = daemon.stub()
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[pid]), duration_ns=2 * SECOND_NS)
    capture = watch_to_end(stub, stub.CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=scaled(10)).id)
    assert capture.status == pb.CAPTURE_STATUS_DONE
    chunks = stub.FetchTrace(pb.FetchTraceRequest(capture_id=capture.id), timeout=scaled(10))
    file = folder / "trace.json.gz"
    file.write_bytes(b"".join(chunk.data for chunk in chunks))
    trace = open_trace(file)
    return {name: list(run_view(name, trace).rows()) for name in VIEWS}


@pytest.mark.slow
def test_a_capture_tells_who_ran_and_who_was_blocked(daemon: Daemon, tmp_path: Path) -> None:
    with connected(daemon, TARGET) as process:
        found = traced(daemon, process.pid, tmp_path)
    (computes,) = (row for row in found["threads"] if row["name"] == "computes")
    # On a busy machine it waits, and the kernel counts a wait only when it is over: the last one is missing here.
    assert computes["cpu_pct"] + computes["cpu_wait_pct"] > 50
    assert computes["blocked_pct"] < 50
    others = [row for row in found["threads"] if row["name"] != "computes"]
    assert all(row["cpu_pct"] < computes["cpu_pct"] for row in others)
    (use,) = found["process_use"]
    assert (use["usable_cores"], use["host_cores"]) == (len(os.sched_getaffinity(0)), os.cpu_count())
    assert 0.5 < use["seconds"] < scaled(7)  # from the first to the last look, which come late on a busy machine
    assert len([row for row in found["thread_times"] if row["name"] == "computes"]) >= 2
    (worker,) = found["child_processes"]
    assert worker["name"].startswith("python")
    assert worker["cpu_pct"] + worker["cpu_wait_pct"] > 50
    settings = {row["setting"]: row["effect"] for row in found["settings"]}
    assert settings["env.CUDA_LAUNCH_BLOCKING"] == "slows"
    assert (settings["python.gc_enabled"], "env.HF_TOKEN" in settings) == (None, False)


@pytest.mark.slow
def test_a_capture_tells_that_a_quota_stops_the_process(daemon: Daemon, tmp_path: Path) -> None:
    with connected(daemon, TARGET) as process:
        try:
            with cpu_group(f"kineto-quota-{process.pid}") as group:
                group.limit(0.1, 20)  # less than a busy machine gives it
                group.add([process.pid])
                found = traced(daemon, process.pid, tmp_path)
                process.kill()
                process.wait()
        except OSError as exc:
            pytest.skip(f"control groups cannot be made here: {exc}")
    (use,) = found["process_use"]
    assert use["quota_cores"] == 0.1
    assert use["throttled_pct"] > 10  # nearly all periods on a quiet machine; on a busy one it does not get its quota
    assert use["cpu_cores"] < 0.5
