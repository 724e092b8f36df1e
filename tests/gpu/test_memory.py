"""On a real GPU: memory snapshots and allocation events of a running program are those that torch gives."""

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kineto_trace.snapshots.snapshot_reader import read_snapshot
from kineto_trace.snapshots.snapshot_results import curve_of, device_memory
from support.machine.gpus import torch_with_driver
from support.service.cli import run_process, wait_for_agent
from support.service.daemon import Daemon, running_daemon

torch = torch_with_driver()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
KEPT_BYTES = 3 << 20  # one block that lives all the time
LOOP = f"""
import json, sys, threading, time
import torch
import kineto_agent
own = sys.argv[1:] == ["own"]
kept = torch.empty({KEPT_BYTES}, dtype=torch.uint8, device="cuda")
if own:
    torch.cuda.memory._record_memory_history(max_entries=1000)
kineto_agent.start()
print("ready", flush=True)
commands = []
threading.Thread(target=lambda: commands.append(sys.stdin.readline()), daemon=True).start()
while not commands:
    x = torch.ones(1000, device="cuda")
    y = x @ x.T if x.dim() > 1 else x * 2
    del x, y
    time.sleep(0.0005)
enabled = torch._C._cuda_isHistoryEnabled()
entries = len(torch.cuda.memory._snapshot()["device_traces"][0])
print(json.dumps([enabled, entries]), flush=True)
"""


class Program:
    """The loop; `end` gives whether history was on, and how many entries it had."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.pid = process.pid

    def end(self) -> Any:
        """Its last words."""
        out, _ = self.process.communicate("end\n", timeout=60)
        return json.loads(out)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as started:
        yield started


@contextmanager
def program(daemon: Daemon, *arguments: str) -> Iterator[Program]:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=daemon.client_environ(),
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        wait_for_agent(daemon, process.pid)
        yield Program(process)
    finally:
        process.kill()
        process.communicate()


def captured(daemon: Daemon, folder: Path, *arguments: str) -> Any:
    """The target's document."""
    command = [*arguments, "--duration", "1s", "--output-dir", str(folder), "-o", "json"]
    result = run_process(command, daemon.client_environ())
    assert result.code == 0, result.stdout + result.stderr
    (target,) = result.json()["targets"]
    return target


def the_file(target: Any, file_format: str) -> Path:
    (path,) = [Path(file["path"]) for file in target["files"] if file["format"] == file_format]
    return path


@pytest.mark.parametrize("stack", [(), ("--with-stack",)], ids=["plain", "stacks"])
def test_a_snapshot_has_segments_and_traces_and_the_visualiser_reads_it(
    daemon: Daemon, tmp_path: Path, stack: tuple[str, ...]
) -> None:
    from torch.cuda._memory_viz import segsum, trace_plot

    with program(daemon) as running:
        target = captured(daemon, tmp_path, "memory", "--pid", str(running.pid), *stack)
        enabled, _ = running.end()
    assert not enabled
    data = pickle.loads(the_file(target, "memory-snapshot").read_bytes())
    blocks = [block for segment in data["segments"] for block in segment["blocks"]]
    assert KEPT_BYTES in {block["requested_size"] for block in blocks if block["state"] == "active_allocated"}
    (trace,) = [trace for trace in data["device_traces"] if trace]
    assert {"alloc", "free_requested", "free_completed"} <= {entry["action"] for entry in trace}
    assert any("<string>" in str(entry.get("frames")) for entry in trace) == bool(stack)
    assert segsum(data)
    assert "<html" in trace_plot(data)
    read = read_snapshot(the_file(target, "memory-snapshot"))
    (memory,) = device_memory(read.segments)
    assert memory.reserved == sum(segment["total_size"] for segment in data["segments"])
    assert memory.allocated == sum(segment["allocated_size"] for segment in data["segments"])
    assert memory.active == sum(segment["active_size"] for segment in data["segments"])
    assert len(curve_of(read, memory.device).times) == len(trace)
    assert bool(read.stacks) == bool(stack)
    (counts,) = [each for each in target["counts"] if each["source"] == "memory_snapshot"]
    print(f"\nsnapshot {stack}: {counts['way']}, {counts['bytes']} bytes")


def test_allocation_events_lie_in_the_window_and_sum_up(daemon: Daemon, tmp_path: Path) -> None:
    with program(daemon) as running:
        arguments = ("trace", "--pid", str(running.pid), "--memory", "--format", "chrome-json")
        target = captured(daemon, tmp_path, *arguments)
        running.end()
    trace = json.loads(the_file(target, "chrome-json").read_text())
    rows = [event for event in trace["traceEvents"] if event.get("name") == "[memory]"]
    assert len(rows) > 100
    rows.sort(key=lambda event: event["ts"])
    base = trace["baseTimeNanoseconds"]
    start, end = int(target["summary"]["window_start_ns"]), int(target["summary"]["window_end_ns"])
    times = [base + round(event["ts"] * 1000) for event in rows]
    assert start <= times[0] + 1000  # the history has whole microseconds
    assert times[-1] < end
    assert times[-1] - times[0] > 0.9 * (end - start)  # one clock, and the whole window
    assert {event["args"]["Device Type"] for event in rows} == {1}
    sizes = [event["args"]["Bytes"] for event in rows]
    totals = [event["args"]["Total Allocated"] for event in rows]
    assert totals[-1] - totals[0] == sum(sizes[1:])
    assert min(totals) >= KEPT_BYTES
    assert max(totals) < KEPT_BYTES + (1 << 20)
    assert {4000, -4000} <= set(sizes)
    held: dict[int, int] = {}
    for event in rows:  # every free is that of the allocation at its address
        address, size = event["args"]["Addr"], event["args"]["Bytes"]
        if size < 0:
            assert held.pop(address, -size) == -size
        else:
            assert address not in held
            held[address] = size


def test_allocation_events_share_the_clock_of_the_kernels(daemon: Daemon, tmp_path: Path) -> None:
    """A block that a kernel fills is allocated before that kernel is launched, by less than a step."""
    with program(daemon) as running:
        types = ("--activities", "kernel,cuda_runtime", "--memory")
        target = captured(daemon, tmp_path, "trace", "--pid", str(running.pid), *types, "--format", "chrome-json")
        running.end()
    events = json.loads(the_file(target, "chrome-json").read_text())["traceEvents"]
    launches = sorted(event["ts"] for event in events if event.get("name") == "cudaLaunchKernel")
    allocations = [e["ts"] for e in events if e.get("name") == "[memory]" and e["args"]["Bytes"] > 0]
    delays = []
    for allocation in allocations[10:-10]:
        following = [launch for launch in launches if launch >= allocation][:1]
        delays += [launch - allocation for launch in following]
    delays.sort()
    print(f"\nallocation to launch: median {delays[len(delays) // 2]:.1f} us")
    assert 0 <= delays[len(delays) // 2] < 200


def test_the_programs_own_history_survives(daemon: Daemon, tmp_path: Path) -> None:
    with program(daemon, "own") as running:
        target = captured(daemon, tmp_path, "memory", "--pid", str(running.pid))
        enabled, entries = running.end()
    assert any("its own history was used and left on" in warning for warning in target["warnings"])
    assert (enabled, entries) == (True, 1000)
    data = pickle.loads(the_file(target, "memory-snapshot").read_bytes())
    assert max(map(len, data["device_traces"])) == 1000


def test_a_snapshot_and_allocation_events_come_with_one_trace(daemon: Daemon, tmp_path: Path) -> None:
    with program(daemon) as running:
        types = ("--activities", "kernel,memory_snapshot", "--memory")
        target = captured(daemon, tmp_path, "trace", "--pid", str(running.pid), *types)
        enabled, _ = running.end()
    assert not enabled
    assert {file["format"] for file in target["files"]} == {"chrome", "memory-snapshot"}
