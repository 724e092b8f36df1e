"""Training loops of torch that nobody prepared, captured by iteration: agents come in, count, and are aligned."""

import gzip
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from support.service.cli import run_process
from support.service.daemon import Daemon

pytestmark = [pytest.mark.slow, pytest.mark.torch]

# Trains, in lockstep with another process if it is given a socket to it, and marks each of its true steps.
RANK = """
import socket, sys, time, torch
torch.set_num_threads(1)
peer = socket.socket(fileno=int(sys.argv[1])) if len(sys.argv) > 1 else None
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
data = torch.randn(8, 16)
step = 0
while True:
    with torch.profiler.record_function(f"true step {step}"):
        optimizer.zero_grad()
        model(data).sum().backward()
        time.sleep(0.02)  # the length of an iteration
    if peer is not None:
        peer.send(b".")
        peer.recv(1)
    optimizer.step()
    step += 1
    if step == 3:
        print("ready", flush=True)
"""


@contextmanager
def rank(peer: socket.socket | None = None) -> Iterator["subprocess.Popen[str]"]:
    """An unprepared process that has trained a little."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("KINETO", "PYTHON"))}
    descriptors = [peer.fileno()] if peer is not None else []
    command = [sys.executable, "-c", RANK, *map(str, descriptors)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, text=True, pass_fds=descriptors)
    assert process.stdout is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def traced(daemon: Daemon, folder: Path, *arguments: str) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The targets of a trace, and the annotations of each, in the order of their begin; exact times in us."""
    result = run_process(["trace", *arguments, "--output-dir", str(folder), "-o", "json"], daemon.client_environ())
    if "ATTACH_NOT_PERMITTED" in result.stderr:
        pytest.skip("the kernel does not let us trace (ptrace_scope?)")
    assert result.code == 0, result.stderr
    found = []
    for target in result.json()["targets"]:
        (file,) = target["files"]
        events = json.loads(gzip.decompress(Path(file["path"]).read_bytes()), parse_float=Decimal)["traceEvents"]
        annotations = [event for event in events if event.get("cat") == "user_annotation"]
        found.append((target, sorted(annotations, key=itemgetter("ts"))))
    return found


def named(annotations: list[dict[str, Any]], prefix: str) -> list[str]:
    return [event["name"] for event in annotations if event["name"].startswith(prefix)]


def test_the_iterations_of_an_unprepared_loop_hold_its_steps(daemon: Daemon, tmp_path: Path) -> None:
    with rank() as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        ((target, annotations),) = traced(daemon, tmp_path, "--pid", str(process.pid), "--iterations", "3")
    assert target["verdict"] == "VERDICT_DONE"
    steps = [event for event in annotations if event["name"].startswith("ProfilerStep#")]
    assert len(steps) == 3
    assert {event["tid"] for event in steps} == {process.pid}
    for event in annotations:  # every annotation of a step lies in that step, also the optimizer's own
        start, end = event["ts"], event["ts"] + event["dur"]
        for step in steps:
            first, last = step["ts"], step["ts"] + step["dur"]
            assert end <= first or start >= last or (first <= start and end <= last) or event is step
    assert len(named(annotations, "true step")) == 3


def test_unprepared_ranks_in_lockstep_record_the_same_steps(daemon: Daemon, tmp_path: Path) -> None:
    """Their agents come at different times, so that their counts differ; the steps in the traces do not."""
    ours, theirs = socket.socketpair()
    with ExitStack() as stack:
        ranks = [stack.enter_context(rank(end)) for end in (ours, theirs)]
        for end in (ours, theirs):
            end.close()
        for process in ranks:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        traced(daemon, tmp_path, "--pid", str(ranks[0].pid), "--iterations", "1")  # this one counts already
        pids = [argument for process in ranks for argument in ("--pid", str(process.pid))]
        (_, first), (_, second) = traced(daemon, tmp_path, *pids, "--iterations", "4")
    true_steps = named(first, "true step")
    assert len(true_steps) == 4
    assert named(second, "true step") == true_steps
    assert len(named(first, "ProfilerStep#")) == len(named(second, "ProfilerStep#")) == 4
    assert named(first, "ProfilerStep#") != named(second, "ProfilerStep#")
