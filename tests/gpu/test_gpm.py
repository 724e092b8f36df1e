"""On a real GPU from Hopper on: what its units do is counted truly, at little cost, and beside a profiler.

The work is done in this process, and counted by the process that reads the GPUs for the daemon, as it always is.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pynvml
import pytest
from kinetod.gpus.gpu_reader import GpuReader
from kinetod.gpus.gpu_types import NAMES, GpuState, between
from kinetod.gpus.nvml import LEAST_S, NOT_ALLOWED, GpmCounter
from support.machine.gpus import torch_with_driver

torch = torch_with_driver()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
        reason="needs an NVIDIA GPU from Hopper on",
    ),
]
PHASE_S = 1.5
DEADLINE_S = 60.0
STEPS = 20
MOST_MS = 20.0
NOBODY = 65534


class Watched:
    """The GPU that torch works on, as the reader process sees it."""

    def __init__(self, reader: GpuReader) -> None:
        self._reader = reader
        self._uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"

    def now(self) -> GpuState:
        """A fresh reading. A sample is at least LEAST_S old then."""
        found = self._reader.read(max_age_s=0, deadline_s=DEADLINE_S)
        (gpu,) = (each for each in found.gpus if each.uuid == self._uuid)
        assert gpu.activity is not None, gpu.activity_note
        return gpu

    def during(self, work: Callable[[], object]) -> dict[str, float]:
        """Shares and bytes per second while that was done again and again."""
        work()  # the first time takes longer
        torch.cuda.synchronize()
        began = before = self.now()
        while seconds(before) - seconds(began) < LEAST_S:  # a sample may be that old, of what was done before
            work()
            torch.cuda.synchronize()
            before = self.now()
        end = time.monotonic() + PHASE_S
        while time.monotonic() < end:
            work()
            torch.cuda.synchronize()
        rates = between(before.activity, self.now().activity)
        print(json.dumps({name: round(rate, 4) for name, rate in rates.items()}))
        return rates


def seconds(gpu: GpuState) -> float:
    """For how long its units have been observed."""
    assert gpu.activity is not None
    return gpu.activity.seconds


@pytest.fixture(scope="module")
def gpu() -> Iterator[Watched]:
    reader = GpuReader()
    yield Watched(reader)
    reader.close()


def test_a_gpu_that_does_nothing_is_idle(gpu: Watched) -> None:
    rates = gpu.during(lambda: time.sleep(0.1))
    assert set(rates) >= set(NAMES) - {"nvlink_transmit", "nvlink_receive"}
    assert max(rates["sm_active"], rates["tensor_active"], rates["dram_active"]) < 0.02


def test_a_matmul_keeps_multiprocessors_and_tensor_cores_busy(gpu: Watched) -> None:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rates = gpu.during(lambda: [a @ b for _ in range(20)])
    assert rates["sm_active"] > 0.8
    assert rates["tensor_active"] > 0.6  # PM sampling of CUPTI: 0.93
    assert rates["dram_active"] < 0.5


def test_a_copy_keeps_the_memory_busy_and_no_tensor_core(gpu: Watched) -> None:
    source = torch.empty(1 << 29, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    rates = gpu.during(lambda: [target.copy_(source) for _ in range(20)])
    assert rates["dram_active"] > 0.6  # PM sampling of CUPTI: 0.87
    assert rates["tensor_active"] < 0.02


def test_single_precision_keeps_its_pipe_busy_and_no_tensor_core(gpu: Watched) -> None:
    a, b = (torch.randn(4096, 4096, device="cuda") for _ in range(2))
    rates = gpu.during(lambda: [a @ b for _ in range(20)])
    assert rates["fp32_active"] > 0.3
    assert max(rates["fp64_active"], rates["tensor_active"]) < 0.05


def test_double_precision_keeps_its_pipe_busy(gpu: Watched) -> None:
    angles = torch.randn(1 << 25, device="cuda", dtype=torch.float64)
    rates = gpu.during(lambda: [torch.sin(angles) for _ in range(20)])
    assert rates["fp64_active"] > 0.05
    assert rates["fp64_active"] > rates["fp32_active"]


def test_copies_from_the_host_are_what_the_gpu_receives(gpu: Watched) -> None:
    source = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    rates = gpu.during(lambda: target.copy_(source, non_blocking=True))
    assert rates["pcie_receive"] > 2e9
    assert rates["pcie_receive"] > 2 * rates["pcie_transmit"]


def test_a_profiler_in_the_process_sees_every_kernel_meanwhile(gpu: Watched) -> None:
    a = torch.ones(256, 256, device="cuda")
    before = gpu.now()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(10):
            for _ in range(100):
                a.add_(1)
            torch.cuda.synchronize()
            assert gpu.now().activity is not None
    kernels = [event for event in profiler.events() if "elementwise" in event.name and event.device_type.name == "CUDA"]
    assert len(kernels) == 1000
    assert between(before.activity, gpu.now().activity)["sm_active"] > 0


@contextmanager
def counter() -> Iterator[GpmCounter]:
    pynvml.nvmlInit()
    try:
        yield GpmCounter(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}"))
    finally:
        pynvml.nvmlShutdown()


def test_a_sample_costs_little() -> None:
    with counter() as counted:
        took, used = [], []
        for _ in range(STEPS):
            time.sleep(LEAST_S)
            began, cpu = time.perf_counter(), time.process_time()
            counted.step()
            took.append((time.perf_counter() - began) * 1e3)
            used.append((time.process_time() - cpu) * 1e3)
        counted.close()
    print(f"a sample: {statistics.median(took):.2f} ms (at most {max(took):.2f}), CPU {statistics.median(used):.2f} ms")
    assert statistics.median(took) < MOST_MS


def test_another_user_is_served_or_told_that_the_driver_refuses() -> None:
    command = [sys.executable, "-m", "kinetod.gpus.reader_process"]
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    done = subprocess.run(
        command, input=b"?", capture_output=True, check=False, user=NOBODY, group=NOBODY, extra_groups=[]
    )
    if b"PermissionError" in done.stderr or b"No module named" in done.stderr:
        pytest.skip(f"uid {NOBODY} cannot read this source tree")
    assert (done.returncode, done.stderr) == (0, b"")
    (gpu, *_) = json.loads(done.stdout)["gpus"]
    print(f"as uid {NOBODY}: {gpu['activity'] or gpu['activity_note']}")
    assert gpu["activity"] is not None or gpu["activity_note"] == NOT_ALLOWED
