"""Who has the counters of a GPU, in a folder that stands for /proc."""

import os
from pathlib import Path

import pytest
from kinetod.counters.counter_holders import UNKNOWN, holder
from support.accelerators.drm_host import DrmHost

BUS = "0000:1B:00.0"


def process(proc: Path, pid: int, name: str, gpus: tuple[int, ...], library: str = "") -> None:
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "comm").write_text(f"{name}\n")
    (folder / "cmdline").write_bytes(f"/usr/bin/{name}\0".encode())
    line = f"7f0000000000-7f0000001000 r-xp 00000000 08:01 77    /usr/lib/{library}\n" if library else ""
    (folder / "maps").write_text(line)
    for number, gpu in enumerate(gpus):
        (folder / "fd" / str(number)).symlink_to(f"/dev/nvidia{gpu}")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    gpu = tmp_path / "driver/nvidia/gpus/0000:1b:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t Fake\nDevice Minor: \t 3\n")
    process(tmp_path, 50, "python3", (3,))
    return tmp_path


def test_a_host_without_a_sign_of_a_profiler_has_no_name_to_tell(proc: Path) -> None:
    assert holder(BUS, proc) == UNKNOWN


def test_a_profiler_that_has_the_gpu_open_is_named(proc: Path) -> None:
    process(proc, 60, "ncu", (3,))
    assert holder(BUS, proc) == "Nsight Compute (process 60)"


def test_one_that_has_another_gpu_open_is_not(proc: Path) -> None:
    process(proc, 60, "ncu", (1,))
    process(proc, 61, "nv-hostengine", (3,), "libdcgmmoduleprofiling.so.4")
    assert holder(BUS, proc) == "DCGM (process 61)"


def test_one_that_only_may_hold_counters_is_named_last(proc: Path) -> None:
    process(proc, 60, "nsys", (3,))
    assert holder(BUS, proc) == "Nsight Systems (process 60)"
    process(proc, 61, "train", (3,), "libnvperf_host.so")
    assert holder(BUS, proc) == "CUPTI's hardware counters (process 61)"


def test_a_tool_is_named_rather_than_the_program_that_it_measures(proc: Path) -> None:
    process(proc, 60, "ncu", ())
    process(proc, 61, "train", (3,), "libnvperf_host.so")
    assert holder(BUS, proc) == "Nsight Compute (process 60)"


def test_our_own_process_is_not_the_holder(proc: Path) -> None:
    process(proc, os.getpid(), "kinetod-counters", (3,), "libnvperf_host.so")
    assert holder(BUS, proc) == UNKNOWN


def test_nobody_is_suspected_of_the_counters_of_another_vendors_gpu(proc: Path, tmp_path: Path) -> None:
    host = DrmHost(tmp_path / "host")
    host.gpu("amdgpu", "0000:c1:00.0", 128)
    process(proc, 60, "ncu", ())
    assert holder("0000:c1:00.0", proc, host.sys) == UNKNOWN
    assert holder(BUS, proc, host.sys) == "Nsight Compute (process 60)"
