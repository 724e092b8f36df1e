"""Who streams metrics of Intel's GPUs, by the open files of processes."""

import os
from pathlib import Path

import pytest
from kinetod.counters.level_zero_library import stream_holder
from kinetod.counters.sampler_server import UNKNOWN, holder


def process(proc: Path, pid: int, *files: str) -> None:
    (proc / str(pid) / "fd").mkdir(parents=True)
    (proc / str(pid) / "comm").write_text("unitrace\n")
    for number, target in enumerate(files):
        (proc / str(pid) / "fd" / str(number)).symlink_to(target)


@pytest.mark.parametrize("stream", ["anon_inode:[i915_perf]", "anon_inode:[xe_oa]"])
def test_a_process_with_a_stream_is_named(tmp_path: Path, stream: str) -> None:
    process(tmp_path, 12, "/dev/null", "anon_inode:[eventpoll]")
    assert stream_holder(tmp_path) == ""
    process(tmp_path, 34, "/dev/dri/renderD128", stream)
    assert stream_holder(tmp_path) == "unitrace (process 34)"


def test_an_own_stream_is_nobody_elses(tmp_path: Path) -> None:
    process(tmp_path, os.getpid(), "anon_inode:[xe_oa]")
    assert stream_holder(tmp_path) == ""


@pytest.mark.parametrize(("driver", "found"), [("xe", "unitrace (process 34)"), ("amdgpu", UNKNOWN)])
def test_the_holder_of_an_intel_gpu_is_who_has_a_stream(tmp_path: Path, driver: str, found: str) -> None:
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    process(proc, 34, "anon_inode:[xe_oa]")
    device = sys / "devices/0000:03:00.0"
    (sys / "drivers" / driver).mkdir(parents=True)
    device.mkdir(parents=True)
    (device / "driver").symlink_to(sys / "drivers" / driver)
    (sys / "class/drm/renderD128").mkdir(parents=True)
    (sys / "class/drm/renderD128/device").symlink_to(device)
    assert holder("0000:03:00.0", proc, sys) == found
