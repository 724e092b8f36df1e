"""Which files of a process are looked at for device code that launches graphs."""

import os
import random
import struct
import time
from pathlib import Path

import pytest
from kinetod.attach.inspect import device_graph_code
from kinetod.attach.inspect.process_inspection import mapped_paths
from support.machine.device_code import LAUNCH, LAUNCHING, cubin, elf, fatbin, program
from support.machine.device_code import fatbin as container
from support.service import subjects

WITH = program(fatbin(LAUNCHING))
PLAIN = cubin({"kernel": 1})


def process(folder: Path, files: dict[str, bytes]) -> Path:
    """A /proc in which process 7 maps these files, of which the first is its program."""
    root = folder / "7" / "root"
    for path, content in files.items():
        place = Path(f"{root}{path}")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    lines = [f"7f00-7f01 r-xp 00000000 00:01 1 {' ' * 20} {path}\n" for path in files]
    (folder / "7" / "maps").write_text("".join(lines))
    (folder / "7" / "exe").symlink_to(f"{root}{next(iter(files))}")
    return folder


def test_the_program_itself(tmp_path: Path) -> None:
    found = device_graph_code.find(7, process(tmp_path, {"/opt/server": WITH}))
    assert found.endswith("/opt/server")


def test_a_library_is_named_as_the_process_sees_it(tmp_path: Path) -> None:
    files = {"/usr/bin/python3": b"", "/usr/lib/libm.so.6": b"", "/home/me/ext.cpython-311.so": WITH}
    assert device_graph_code.find(7, process(tmp_path, files)) == "/home/me/ext.cpython-311.so"


@pytest.mark.parametrize(
    "path",
    ["/site/torch/lib/libtorch_cuda.so", "/site/torch/lib/ours.so", "/site/nvidia/cu13/lib/libother.so.1",
     "/site/jaxlib/x.so", "/usr/lib/libcublas.so.13", "/usr/lib/libnccl.so.2", "/usr/lib/libcublasLt.so.12.9.1",
     "/usr/lib/libnvidia-ptxjitcompiler.so.580.1", "/usr/lib/libnvrtc-builtins.so.13.0",
     "/usr/lib/libcudnn_engines_precompiled.so.9", "/data/weights.bin"],
)  # fmt: skip
def test_libraries_of_vendors_and_frameworks_and_other_files_are_left_out(path: str, tmp_path: Path) -> None:
    assert device_graph_code.find(7, process(tmp_path, {"/opt/server": b"", path: WITH})) == ""


@pytest.mark.parametrize("name", ["libcustom.so", "libcuda_kernels.so", "libnv_ours.so.2", "libc10d_ours.so"])
def test_a_library_of_the_programs_own_with_a_similar_name_is_looked_at(name: str, tmp_path: Path) -> None:
    assert device_graph_code.find(7, process(tmp_path, {"/opt/server": b"", f"/opt/{name}": WITH})) == f"/opt/{name}"


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    proc = process(tmp_path, {"/opt/server": b"", "/opt/gone.so": b"", "/opt/ours.so": WITH})
    (tmp_path / "7/root/opt/gone.so").unlink()
    assert device_graph_code.find(7, proc) == "/opt/ours.so"
    assert device_graph_code.find(8, proc) == ""


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    def note(descriptor: int) -> bool:
        reads.append(descriptor)
        return False

    monkeypatch.setattr(device_graph_code, "launches_graphs", note)
    proc = process(tmp_path, {"/opt/server": b"1"})
    assert (device_graph_code.find(7, proc), device_graph_code.find(7, proc), len(reads)) == ("", "", 1)
    (tmp_path / "7/root/opt/server").write_bytes(b"12")
    assert (device_graph_code.find(7, proc), len(reads)) == ("", 2)


def test_time_in_which_a_busy_host_runs_somebody_else_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(folder: Path) -> list[str]:
        time.sleep(1.5 * device_graph_code.BUDGET_S)
        return list(mapped_paths(folder))

    monkeypatch.setattr(device_graph_code, "mapped_paths", late)
    assert device_graph_code.find(7, process(tmp_path, {"/opt/server": WITH})).endswith("/opt/server")


def test_no_file_is_opened_after_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_graph_code, "BUDGET_S", -1.0)
    assert device_graph_code.find(7, process(tmp_path, {"/opt/server": WITH})) == ""


def launches(path: Path, content: bytes | None = None) -> bool:
    if content is not None:
        path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return device_graph_code.launches_graphs(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    "section",
    [
        container(LAUNCHING),
        container(PLAIN, PLAIN, LAUNCHING),
        container(PLAIN) + container(LAUNCHING),
        container(PLAIN) + bytes(40) + container(LAUNCHING),
        container(b".version 9.0", kind=1) + container(LAUNCHING),
        container(cubin({"my_" + LAUNCH: 1, LAUNCH: 0})),
    ],
    ids=["one", "third entry", "second container", "with a gap", "after PTX", "beside a longer name"],
)
def test_device_code_that_imports_the_launch_is_found(section: bytes, tmp_path: Path) -> None:
    assert launches(tmp_path / "program", program(section))


@pytest.mark.parametrize(
    "content",
    [
        program(b""),
        program(container()),
        program(container(PLAIN)),
        program(container(cubin({LAUNCH: 1}))),
        program(container(cubin({"my_" + LAUNCH: 0, LAUNCH + "_v2": 0}))),
        program(container(cubin({LAUNCH: 0}, machine=62))),
        program(container(b"\x28\xb5\x2f\xfd" + bytes(100))),
        program(container(LAUNCHING), ".nv_other"),
        elf(62, []),
        b"",
        b"\x7fELF",
        b"#!/bin/sh\n" * 100,
    ],
    ids=["empty section", "empty container", "other kernels", "defined there", "other names", "no device code",
         "compressed", "other section", "no sections", "empty file", "four bytes", "script"],
)  # fmt: skip
def test_what_has_no_such_code_is_not(content: bytes, tmp_path: Path) -> None:
    assert not launches(tmp_path / "program", content)


def test_real_programs_have_none() -> None:
    assert not launches(Path(subjects.SLEEP))
    assert not launches(Path("/proc/self/exe"))
    assert not launches(Path("/dev/null"))


def test_a_file_that_is_cut_anywhere_gives_an_answer(tmp_path: Path) -> None:
    whole = program(container(PLAIN, LAUNCHING))
    assert not any(launches(tmp_path / "program", whole[:size]) for size in range(0, len(whole) - 64, 7))


def test_a_damaged_file_gives_an_answer(tmp_path: Path) -> None:
    whole, choose = program(container(PLAIN, LAUNCHING)), random.Random(14)
    for _ in range(2000):
        damaged = bytearray(whole)
        for _ in range(choose.randint(1, 4)):
            at, value = choose.randrange(len(whole) - 8), choose.choice((0, 1, 255, 2**31, 2**63 - 1, 2**64 - 1))
            damaged[at : at + 8] = struct.pack("<Q", value)
        assert launches(tmp_path / "program", bytes(damaged)) in (True, False)


def test_the_number_of_containers_and_entries_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        nonlocal reads
        reads += 1
        return os_pread(descriptor, size, offset)

    os_pread = os.pread
    monkeypatch.setattr(os, "pread", pread)
    assert not launches(tmp_path / "containers", program(container() * 20_000 + container(LAUNCHING)))
    assert not launches(tmp_path / "entries", program(container(*[b"x"] * 20_000)))
    assert reads < 20_000


def test_large_files_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "library"
    assert launches(path, program(container(LAUNCHING)))
    os.truncate(path, device_graph_code.MAX_FILE_BYTES + 1)
    assert not launches(path)
