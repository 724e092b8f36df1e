"""On a real GPU: a trace by pid holds, step for step, what Kineto's own trace of the same loop holds."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from bench import overhead  # its control of the training loop
from support.machine.gpus import torch_with_driver
from support.service.daemon import running_daemon

torch = torch_with_driver()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
STEPS = 10
GPUS = 16  # Kineto's process ids of GPU rows are below this
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
API_CATEGORIES = ("cuda_runtime", "cuda_driver")

Counts = dict[str, Counter[str]]


def per_step(trace: dict[str, Any], steps: list[int], first: int) -> Counts:
    """Events by category and name that begin in STEPS steps from `first` on; ends of flows on a GPU's rows and of
    those from forward to backward operators.
    """
    base, begin, end = trace["baseTimeNanoseconds"], steps[first], steps[first + STEPS]
    counts: Counts = {}
    for event in trace["traceEvents"]:
        to_gpu = event["ph"] == "f" and event.get("cat") == "ac2g" and event["pid"] < GPUS
        backward = event["ph"] == "f" and event.get("cat") == "fwdbwd"
        category = "flow to the GPU" if to_gpu else event.get("cat", "")
        if not (to_gpu or backward or event["ph"] == "X") or not begin <= base + round(event["ts"] * 1000) < end:
            continue
        counts.setdefault(category, Counter())[event["name"]] += 1
    return counts


def steps_inside(steps: list[int], begin: int, end: int) -> int:
    """Index of a step boundary well inside a window, with STEPS whole steps after it."""
    inside = [i for i, step in enumerate(steps) if begin <= step <= end]
    assert len(inside) > STEPS + 4, "the window holds too few steps"
    return inside[len(inside) // 2 - STEPS // 2]


@pytest.fixture(scope="module", params=["launch", "compute"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Counts, Counts]:
    """Counts of the same number of steps of one loop: ours and Kineto's."""
    folder = tmp_path_factory.mktemp(request.param)
    log = folder / "log.json"
    with running_daemon() as daemon:
        environ = daemon.client_environ()
        loop = overhead.start_loop(environ, request.param, log, agent=True, extra=[])
        arguments = ["trace", "--pid", str(loop.pid), "--duration", "3s", "--output-dir", str(folder)]
        capture = json.loads(overhead.control(environ, *arguments, "--format", "chrome-json").stdout)
        logged = overhead.end_loop(loop, log)
        window = capture["targets"][0]["summary"]
        (file,) = folder.glob("kineto-*.json")
        ours = json.loads(file.read_text())
        first = steps_inside(logged["steps"], int(window["window_start_ns"]), int(window["window_end_ns"]))
        our_counts = per_step(ours, logged["steps"], first)
        trace = folder / "kineto-own.json"
        loop = overhead.start_loop(
            environ, request.param, log, agent=False, extra=["--torch-profiler", f"0.5,1.5,{trace}"]
        )
        logged = overhead.await_loop(loop, log)
        marks = logged["marks"]
        first = steps_inside(logged["steps"], marks["collecting"], marks["collected"])
        return our_counts, per_step(json.loads(trace.read_text()), logged["steps"], first)


@pytest.mark.parametrize("category", GPU_CATEGORIES)
def test_gpu_activities_agree_by_name(both: tuple[Counts, Counts], category: str) -> None:
    ours, kinetos = both
    assert ours.get(category, Counter()) == kinetos.get(category, Counter())


def test_operators_and_annotations_agree_by_name(both: tuple[Counts, Counts]) -> None:
    ours, kinetos = both
    assert len(kinetos["cpu_op"]) > 20
    assert ours["cpu_op"] == kinetos["cpu_op"]
    annotations = [
        Counter({name: count for name, count in counts["user_annotation"].items() if "ProfilerStep" not in name})
        for counts in both
    ]
    assert annotations[0] == annotations[1]


def test_backward_operators_are_linked_to_the_same_forward_ones(both: tuple[Counts, Counts]) -> None:
    ours, kinetos = both
    assert sum(kinetos["fwdbwd"].values()) > 100
    assert ours["fwdbwd"] == kinetos["fwdbwd"]


@pytest.mark.parametrize("category", API_CATEGORIES)
def test_recorded_api_calls_agree_by_name(both: tuple[Counts, Counts], category: str) -> None:
    ours, kinetos = (counts.get(category, Counter()) for counts in both)
    common = ours.keys() & kinetos.keys()  # each leaves out some calls that the other shows
    assert {name: ours[name] for name in common} == {name: kinetos[name] for name in common}


def test_every_launch_of_kineto_is_recorded(both: tuple[Counts, Counts]) -> None:
    ours, kinetos = both
    for category in API_CATEGORIES:
        calls = kinetos.get(category, Counter())
        launches = {name: count for name, count in calls.items() if "Launch" in name or "Mem" in name}
        assert {name: ours.get(category, Counter())[name] for name in launches} == launches
    assert kinetos["cuda_runtime"]["cudaLaunchKernel"] > 0


def test_flows_agree(both: tuple[Counts, Counts]) -> None:
    ours, kinetos = both
    assert ours["flow to the GPU"] == kinetos["flow to the GPU"]
