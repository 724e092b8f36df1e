"""Whether a file's device code launches CUDA graphs."""

import os
import random
import struct
from pathlib import Path

import pytest
from kinetod.attach.inspect import fatbin
from support.machine.device_code import LAUNCH, LAUNCHING, cubin, elf, program
from support.machine.device_code import fatbin as container
from support.service import subjects

PLAIN = cubin({"kernel": 1})


def launches(path: Path, content: bytes | None = None) -> bool:
    if content is not None:
        path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return fatbin.launches_graphs(descriptor)
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
    os.truncate(path, fatbin.MAX_FILE_BYTES + 1)
    assert not launches(path)
