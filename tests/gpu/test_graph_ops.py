"""On a real GPU: kernels of CUDA graph replays belong to the operators that captured them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import kineto_trace as kt
import pytest
from kineto_trace.analysis.kernels.kernel_views import kernel_owners
from kineto_trace.structure.captured_graphs import KNOWN, NOT_SEEN
from support.machine.gpus import torch_with_driver
from support.service.cli import kinetoctl, wait_for_agent, wait_for_records
from support.service.daemon import Daemon, running_daemon

torch = torch_with_driver()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
REPLAYS_PER_TRACE = 100  # at least
PROGRAM = """
import json, sys, threading
import torch
import kineto_agent
mode, error_mode = sys.argv[1], sys.argv[2]
if mode not in ("late", "attached"):
    kineto_agent.start()

model = torch.nn.Sequential(torch.nn.Linear(96, 192), torch.nn.ReLU(), torch.nn.Linear(192, 32)).cuda()
x = torch.randn(40, 96, device="cuda")
side = torch.cuda.Stream()

def step():
    main = torch.cuda.current_stream()
    with torch.profiler.record_function("forward"):
        y = model(x)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            z = torch.sin(x)
        main.wait_stream(side)
        loss = torch.softmax(y, 1).square().sum() + z.sum()
    loss.backward()
    with torch.no_grad(), torch.profiler.record_function("update"):
        for p in model.parameters():
            p.sub_(p.grad, alpha=0.001)
    return loss

def grads_to_zero():
    for p in model.parameters():
        p.grad = None

warm = torch.cuda.Stream()
with torch.cuda.stream(warm):
    for _ in range(3):
        grads_to_zero()
        step()
torch.cuda.synchronize()

def capture():
    grads_to_zero()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=error_mode):
        step()
    return graph

def eager():
    grads_to_zero()
    step()

run = capture().replay if mode in ("graph", "late", "attached") else eager
if mode == "late":
    kineto_agent.start()
print("ready", flush=True)
commands = []
threading.Thread(target=lambda: [commands.append(line.strip()) for line in sys.stdin], daemon=True).start()
done = 0
while "end" not in commands:
    if "capture" in commands:
        torch.cuda.synchronize()
        run = capture().replay
        commands.remove("capture")
        print("captured", flush=True)
    run()
    done += 1
    if done % 16 == 0:
        torch.cuda.synchronize()
torch.cuda.synchronize()
print(json.dumps({"done": done, "finite": bool(torch.isfinite(model[0].weight).all())}), flush=True)
"""


class Program:
    """The loop of PROGRAM."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> str:
        """What it prints next."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as started:
        yield started


@contextmanager
def program(daemon: Daemon, mode: str, error_mode: str = "global") -> Iterator[Program]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, mode, error_mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=daemon.client_environ(),
        text=True,
    )
    running = Program(process)
    try:
        assert running.line() == "ready"
        if mode != "attached":
            wait_for_agent(daemon, process.pid)
        yield running
        running.tell("end")
        end = json.loads(running.line())
        assert end["done"] > REPLAYS_PER_TRACE and end["finite"]
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def trace(daemon: Daemon, running: Program, *, captures: bool = False) -> kt.Context:
    """A trace of the running loop. captures: the program captures its graph once the recording has begun."""
    pid, duration = running.process.pid, "8s" if captures else "1s"
    command = kinetoctl("trace", "--pid", str(pid), "--duration", duration, "--record-shapes", "-o", "json")
    begun = subprocess.Popen(command, cwd=daemon.root, env=daemon.client_environ(), stdout=subprocess.PIPE, text=True)
    if captures:
        wait_for_records(daemon, pid)
        running.tell("capture")
        assert running.line() == "captured"
    out, _ = begun.communicate(timeout=120)
    assert begun.returncode == 0, out
    (columns,) = [path for path in daemon.state_dir.rglob("columns") if json.loads(out)["id"] in str(path)]
    return kt.Context(kt.open_trace(columns.parent))


def native_kernels(context: kt.Context, steps: int) -> dict[tuple[str, str], int]:
    """How many kernels of torch's own each operator runs in a step, by the names of both. cuBLAS may choose anew."""
    names, table = context.trace.strings, context.trace.table("kernel")
    pairs = Counter(zip(context.get(kernel_owners).tolist(), table["name"].tolist(), strict=True))
    return {
        (names[owner] if owner >= 0 else "", names[kernel]): round(count / steps)
        for (owner, kernel), count in pairs.items()
        if "at::native" in names[kernel] and count > steps / 2
    }


def steps_of(context: kt.Context) -> int:
    """The loop's steps in the trace: each has one forward softmax."""
    names = context.trace.strings
    return sum("softmax_warp_forward" in names[name] for name in context.trace.table("kernel")["name"].tolist())


@pytest.fixture(scope="module")
def eager(daemon: Daemon) -> dict[tuple[str, str], int]:
    with program(daemon, "eager") as running:
        found = trace(daemon, running)
    return native_kernels(found, steps_of(found))


@pytest.mark.parametrize("error_mode", ["global", "thread_local", "relaxed"])
def test_kernels_of_replays_belong_to_the_operators_that_run_them_without_a_graph(
    daemon: Daemon, eager: dict[tuple[str, str], int], error_mode: str
) -> None:
    with program(daemon, "graph", error_mode) as running:
        found = trace(daemon, running)
    (graph,) = kt.run_view("cuda_graphs", found).rows()
    assert (graph["operators"], graph["launches"] > REPLAYS_PER_TRACE) == (KNOWN, True), graph
    assert graph["operators_pct"] > 99
    assert len(eager) > 8
    assert native_kernels(found, steps_of(found)) == eager
    rows = kt.run_view("graph_operators", found).rows()
    inputs = {(row["path"], str(row["input_shape"]).replace(" ", "")) for row in rows}
    for sizes in ("[[192],[40,96],[96,192]", "[[32],[40,192],[192,32]"):
        assert any(path == "forward > aten::linear > aten::addmm" and sizes in text for path, text in inputs), inputs
    calls = Counter(row["path"] for row in rows)
    assert sum(row["calls"] for row in rows if row["path"] == "update > aten::sub_") == 4
    around = "autograd::engine::evaluate_function: AddmmBackward0 > AddmmBackward0"
    assert f"{around} > aten::mm" in calls, calls
    assert "forward > aten::sin" in calls  # on another stream of the same capture
    print(f"\n{error_mode}: {len(rows)} rows, {graph['operators_pct']:.2f} % of {graph['gpu_us']:.0f} us a replay")


def test_a_graph_that_is_captured_while_the_trace_is_recorded_is_known_too(daemon: Daemon) -> None:
    with program(daemon, "during") as running:
        found = trace(daemon, running, captures=True)
    (graph,) = kt.run_view("cuda_graphs", found).rows()
    assert (graph["operators"], graph["operators_pct"] > 99) == (KNOWN, True), graph


def test_a_graph_that_was_captured_before_the_agent_came_belongs_to_what_launches_it(daemon: Daemon) -> None:
    with program(daemon, "late") as running:
        found = trace(daemon, running)
    (graph,) = kt.run_view("cuda_graphs", found).rows()
    assert (graph["operators"], graph["operators_pct"]) == (NOT_SEEN, 0)
    result = kt.run_view("graph_operators", found)
    assert (result.rows(), len(result.notes)) == ([], 1)


def test_later_traces_of_one_process_know_the_graph_as_well(daemon: Daemon) -> None:
    with program(daemon, "graph") as running:
        states = [kt.run_view("cuda_graphs", trace(daemon, running)).rows()[0]["operators"] for _ in range(3)]
    assert states == [KNOWN] * 3


def test_an_attached_agent_knows_the_graphs_that_are_captured_after_it_came(daemon: Daemon) -> None:
    with program(daemon, "attached") as running:
        states = [kt.run_view("cuda_graphs", trace(daemon, running)).rows()[0]["operators"]]
        running.tell("capture")
        assert running.line() == "captured"
        states.append(kt.run_view("cuda_graphs", trace(daemon, running)).rows()[0]["operators"])
    assert states == [NOT_SEEN, KNOWN]
