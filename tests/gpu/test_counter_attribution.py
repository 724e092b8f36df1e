"""On a real GPU: kernels of known intensity are classified as the arithmetic says, from samples longer than they are.

Prints one line of JSON for each case: time, verdicts and counters of its kernels.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.known_work import CASES, KnownCase
from kineto_trace import open_trace
from kineto_trace.analysis.annotation_views import launch_annotations
from kineto_trace.analysis.counters.roofline import BOUND, VERDICTS, activity_use, activity_verdicts
from kineto_trace.kernel_traits.gpu_vendors import gpu_peaks
from kineto_trace.model.context import Context
from kineto_trace.structure.activity_links import gpu
from support.machine.gpus import torch_with_driver
from support.service.cli import run_process, wait_for_agent
from support.service.daemon import child_environ, running_daemon

torch = torch_with_driver()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
RIGHT = 0.95  # of kernel time
TRACED_S = 8
MOST_LOST = 0.01  # of it, at 100 us: lost samples are told


def expected(case: KnownCase, took_s: float) -> str:
    """What the arithmetic says: what share of the peaks a call reaches that took so long."""
    peaks = gpu_peaks(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
    assert peaks is not None, "this GPU is not in the table of peaks"
    reached = {
        "memory-bound": 100 * case.bytes / took_s / (peaks.memory * 1e9),
        "compute-bound": 100 * case.flop / took_s / (peaks.tflops[case.precision] * 1e12),
    }
    most = max(reached, key=lambda name: reached[name])
    return most if reached[most] >= BOUND else "latency-bound"


def traced(folder: Path, *arguments: str) -> Context:
    """A trace of the program with counters."""
    with running_daemon() as daemon:
        program = subprocess.Popen(
            [sys.executable, "-m", "gpu.known_work"],
            env={**daemon.client_environ(), "PYTHONPATH": child_environ()["PYTHONPATH"]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        wait_for_agent(daemon, program.pid)
        command = [
            "trace",
            "--pid",
            str(program.pid),
            "--duration",
            f"{TRACED_S}s",
            "--counters",
            *arguments,
            "-o",
            "json",
        ]
        result = run_process([*command, "--output-dir", str(folder)], daemon.client_environ(), folder)
        program.communicate("end\n", timeout=60)
        assert result.code == 0, result.stderr
        (target,) = result.json()["targets"]
        assert target["verdict"] == "VERDICT_DONE", target
        (counters,) = result.json()["counters"]
        assert int(counters["lost_ns"]) < MOST_LOST * TRACED_S * 1e9, counters
    (path,) = folder.glob("*.json.gz")
    return Context(open_trace(path))


def judged(context: Context) -> dict[str, dict[str, Any]]:
    """By case: ms of its kernels by verdict, and their mean counters."""
    activity, names = context.get(gpu), context.trace.strings
    case, verdict, use = context.get(launch_annotations), context.get(activity_verdicts), context.get(activity_use)
    took = (activity.end - activity.start) / 1e6
    found: dict[str, dict[str, Any]] = {}
    for each in CASES:
        own = case == names.index(each.name)
        by_verdict = np.bincount(verdict[own], took[own], len(VERDICTS))
        calls = np.bincount(activity.name[own]).max(initial=1)  # some take a second kernel
        weighted = {unit: float(np.nansum(value[own] * took[own]) / max(took[own].sum(), 1e-9))
                    for unit, value in use.items()}  # fmt: skip
        found[each.name] = {
            "expected": expected(each, took[own].sum() / 1e3 / calls),
            "us": round(1e3 * float(took[own].sum()) / calls, 1),
            "ms": dict(zip(VERDICTS, np.round(by_verdict, 2).tolist(), strict=True)),
            "use": {unit: round(value, 1) for unit, value in weighted.items()},
        }
    return found


@pytest.mark.parametrize("arguments", [(), ("--counter-interval", "100us")], ids=["1ms", "100us"])
def test_kernel_time_is_classified_as_the_arithmetic_says(arguments: tuple[str, ...], tmp_path: Path) -> None:
    found = judged(traced(tmp_path, *arguments))
    for name, figures in found.items():
        print(json.dumps({name: figures}), file=sys.stderr)
    right = sum(figures["ms"][figures["expected"]] for figures in found.values())
    whole = sum(sum(figures["ms"].values()) for figures in found.values())
    print(json.dumps({"kernel_ms": round(whole, 1), "right": round(right / whole, 4)}), file=sys.stderr)
    assert {figures["expected"] for figures in found.values()} == {"memory-bound", "compute-bound", "latency-bound"}
    assert right / whole >= RIGHT
