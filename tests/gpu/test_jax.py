"""On a real GPU: kernels of a JAX training loop say which HLO operation they ran, and its own profiler goes first.

Needs JAX with CUDA; torch is not used. The loop is attached to live, from outside.
"""

from __future__ import annotations

import ctypes
import gzip
import importlib.util
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from support.service.daemon import Daemon, running_daemon, watch_to_end
from support.targets import programs
from support.xla.profiler_stress import LOOP, OWN_STEPS


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not has_driver(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX"),
]
MODULE = "jit_train_step"
WITHOUT_GRAPHS = "--xla_gpu_enable_command_buffer="


@contextmanager
def loop(flags: str = "") -> Iterator[tuple[Daemon, programs.Program]]:
    environ = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_FLAGS": flags}
    with (
        running_daemon(environ=environ) as daemon,
        programs.program([sys.executable, str(LOOP)], daemon) as process,
    ):
        yield daemon, process


def begin(daemon: Daemon, pid: int, duration_ms: int) -> str:
    """A capture of everything that is recorded by default, which collects by now."""
    spec = pb.CaptureSpec(selector=pb.Selector(pids=[pid]), duration_ns=duration_ms * 10**6)
    capture_id: str = daemon.stub().CreateCapture(pb.CreateCaptureRequest(spec=spec), timeout=60).id
    for event in daemon.stub().WatchCapture(pb.WatchCaptureRequest(id=capture_id), timeout=60):
        if event.target.state == pb.TARGET_STATE_COLLECT:
            break
    return capture_id


def kernels(daemon: Daemon, capture_id: str) -> list[dict[str, Any]]:
    chunks = daemon.stub().FetchTrace(pb.FetchTraceRequest(capture_id=capture_id), timeout=60)
    rows = json.loads(gzip.decompress(b"".join(chunk.data for chunk in chunks)))["traceEvents"]
    return [row for row in rows if row.get("cat") == "kernel" and row["ph"] == "X"]


def ask(process: programs.Program, command: str) -> dict[str, Any]:
    programs.tell(process, command)
    found: dict[str, Any] = json.loads(programs.hear(process))
    return found


@pytest.mark.parametrize("flags", ["", WITHOUT_GRAPHS], ids=["graphs", "no graphs"])
def test_kernels_have_hlo_names_and_these_are_what_jaxs_own_profile_says(flags: str) -> None:
    with loop(flags) as (daemon, process):
        own = {tuple(pair) for pair in ask(process, "profile")["names"]}
        capture_id = begin(daemon, process.pid, 500)
        (target,) = watch_to_end(daemon.stub(), capture_id, 300).targets
        rows = kernels(daemon, capture_id)
        after = ask(process, "profile")
    assert target.verdict == pb.VERDICT_DONE, target.reason
    assert not [text for text in target.warnings if "HLO" in text], list(target.warnings)
    whole = sum(row["dur"] for row in rows)
    named = [row for row in rows if "hlo_op" in row["args"]]
    pairs = {(row["args"]["hlo_module"], row["args"]["hlo_op"]) for row in named}
    share = sum(row["dur"] for row in named) / whole
    print(f"{len(rows)} kernels, {share:.2%} of their time with HLO: {sorted(pairs)}")
    assert len(rows) > 100
    assert share > 0.95
    assert {module for module, _operation in pairs} == {MODULE}
    assert all(row["args"]["source"].startswith(str(LOOP)) for row in named if "source" in row["args"])
    assert any("op_name" in row["args"] and "jit(train_step)" in row["args"]["op_name"] for row in named)
    if flags:  # of operations inside CUDA graphs XLA's own profile may know less than we do
        assert pairs <= own, pairs - own
    assert after["train"] == OWN_STEPS


def test_a_trace_of_its_own_during_a_capture_has_all_its_gpu_events() -> None:
    with loop() as (daemon, process):
        before = ask(process, "profile")
        targets: list[pb.Target] = []
        during: list[dict[str, Any]] = []
        for _ in range(10):
            capture_id = begin(daemon, process.pid, 60_000)
            during.append(ask(process, "profile"))
            targets += watch_to_end(daemon.stub(), capture_id, 300).targets
        after = ask(process, "profile")
    counts = [own["device"] for own in (before, *during, after)]
    print(f"GPU events in the loop's own traces before, during and after captures: {counts}")
    assert before["device"] > 0
    assert set(counts) == {before["device"]}
    assert {own["train"] for own in (before, *during, after)} == {OWN_STEPS}
    for target in targets:
        assert (target.verdict, target.reason_code) == (pb.VERDICT_PARTIAL, "USER_PROFILER_STARTED"), target.reason
        assert "xla" in target.reason or "jax" in target.reason
        assert target.summary.activities["kernel"] > 0
