"""On a real GPU: attaching and detaching neither crashes a busy process nor spoils its own profiles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.machine.gpus import torch_with_driver

torch = torch_with_driver()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BENCH = Path(__file__).parents[1] / "bench"
AGENT = Path(__file__).parents[2] / "agent"
PREAMBLE = f"""
import os, sys, threading, time
sys.path[:0] = [{str(AGENT)!r}, {str(BENCH)!r}, {str(BENCH.parent / "gpu/zoo/programs")!r}]
import torch, training_loop
from kineto_agent.sources.cupti.gpu_activities import CuptiSource
from kineto_agent.sources.interface import SourceRequest

def record(hold_s):
    source = CuptiSource()
    types = frozenset(source.activity_types()) - source.on_request
    session = source.prepare(SourceRequest(types, 64 << 20, {{}}, False))
    session.start()
    time.sleep(hold_s)
    outcome = session.stop()
    session.close()
    return outcome

def statuses_of(children, child):
    running, statuses = 0, set()
    for number in range(children):
        if running == 8:
            statuses.add(os.waitstatus_to_exitcode(os.wait()[1]))
            running -= 1
        if os.fork() == 0:
            child()
        running += 1
    statuses.update(os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(running))
    return sorted(statuses)

def train_while(work):
    done = threading.Thread(target=work)
    done.start()
    while done.is_alive():
        training.step()
"""
# The first capture of a process's life, with all its threads inside CUDA calls, many times over: torch is imported
# once, each forked child has a CUDA context of its own.
FIRST_CAPTURES = """
def child():
    global training
    training = training_loop.Training("launch")
    for _ in range(15):
        training.step()
    outcomes = []
    train_while(lambda: outcomes.append(record(0.05)))
    os._exit(0 if outcomes and outcomes[0].counts.records and outcomes[0].detach_ns else 3)

print(statuses_of(48, child))
"""
# The same where threads change the kernels of executable graphs, which XLA does.
CHANGING_GRAPHS = """
from changing_graphs import ChangingGraphs
def child():
    graphs = ChangingGraphs(4)
    outcome = record(0.05)
    graphs.end()
    os._exit(0 if outcome.detach_ns else 3)

print(statuses_of(160, child))
"""
# p: the program's own torch.profiler around three steps; c: a capture.
BESIDE_THE_PROFILER = """
from torch.profiler import ProfilerActivity, profile
training = training_loop.Training("launch")
for _ in range(20):
    training.step()

def own_profile():
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as own:
        for _ in range(3):
            training.step()
    return sum("CUDA" in str(event.device_type) for event in own.events())

for letter in sys.argv[1]:
    if letter == "p":
        print(own_profile())
    else:
        train_while(lambda: record(0.3))
"""


def run(program: str, *arguments: str) -> str:
    """Standard output of a program, which must end well."""
    command = [sys.executable, "-W", "ignore", "-c", PREAMBLE + program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_first_captures_of_busy_processes_never_crash_them() -> None:
    assert run(FIRST_CAPTURES) == "[0]\n"


def test_first_captures_never_crash_a_process_that_changes_its_graphs() -> None:
    assert run(CHANGING_GRAPHS) == "[0]\n"


@pytest.mark.parametrize("order", ["pcp", "cpcp", "pcpcp", "ccpp"])
def test_the_programs_own_profiles_are_whole_before_and_after_captures(order: str) -> None:
    for _ in range(3):
        counts = run(BESIDE_THE_PROFILER, order).split()
        assert len(set(counts)) == 1, counts
        assert int(counts[0]) > 3000
