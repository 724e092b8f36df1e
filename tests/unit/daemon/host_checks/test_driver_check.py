"""The driver's restriction of hardware counters, and the CUPTI versions of a host."""

from pathlib import Path

import pytest
from kinetod.attach.attach_types import Finding, Status
from kinetod.host_checks import driver_check
from support.machine import native


def found(name: str, proc: Path, root: Path) -> Finding:
    (one,) = (each for each in driver_check.findings(proc, root) if each.name == name)
    return one


@pytest.mark.parametrize(
    ("params", "status"),
    [
        ("ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 1\n", Status.NOTE),
        ("RmProfilingAdminOnly: 0\n", Status.OK),
        ("NVreg_RestrictProfilingToAdminUsers: 1\n", Status.NOTE),
        ("RestrictProfilingToAdminUsers: 0\n", Status.OK),
        ("ResmanDebugLevel: 1\n", Status.UNKNOWN),
        (None, Status.OK),
    ],
)
def test_the_restriction_is_read_under_either_name(tmp_path: Path, params: str | None, status: Status) -> None:
    if params is not None:
        (tmp_path / "driver/nvidia").mkdir(parents=True)
        (tmp_path / "driver/nvidia/params").write_text(params)
    one = found("gpu_counters", tmp_path, tmp_path)
    assert one.status is status
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in one.advice) == (status is Status.NOTE)


@pytest.mark.parametrize(
    ("version", "status", "says"),
    [(130001, Status.OK, "(CUDA 13.0)"), (999999, Status.NOTE, "(unknown version 999999)")],
)
def test_libraries_of_this_host_are_listed_once_with_their_version(
    tmp_path: Path, version: int, status: Status, says: str
) -> None:
    source = tmp_path / "cupti.c"
    source.write_text(f"unsigned cuptiGetVersion(unsigned *version) {{ *version = {version}; return 0; }}\n")
    library = native.build("libcupti.so.99", [source], ["-O2", "-fPIC", "-shared"])
    folder = tmp_path / "usr/local/cuda-13.0/lib64"
    folder.mkdir(parents=True)
    (folder / "libcupti.so.99").write_bytes(library.read_bytes())
    (tmp_path / "usr/local/cuda").symlink_to("cuda-13.0")
    one = found("cupti", tmp_path, tmp_path)
    assert one.status is status
    assert one.detail.count("libcupti.so.99") == 1 and says in one.detail


def test_no_library_is_in_order(tmp_path: Path) -> None:
    assert found("cupti", tmp_path, tmp_path).status is Status.OK
