"""Other profilers among real processes, and in a folder that stands for /proc."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetod.profilers.profiler_scan import ProfilingTool, Scan, look_into, scan
from support.service.daemon import as_user

MAPS = """import mmap, sys
with open(sys.argv[1], "rb") as file:
    kept = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print(flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def process_that_maps(library: Path, prefix: tuple[str, ...] = ()) -> Iterator[int]:
    library.write_bytes(b"x" * 4096)
    command = [*prefix, sys.executable, "-S", "-c", MAPS, str(library)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.stdin.close()


def of(pid: int) -> list[tuple[str, str]]:
    return [(each.product, each.library) for each in scan().profilers if each.pid == pid]


def test_a_process_under_nsight_is_known_by_the_library_in_it(tmp_path: Path) -> None:
    with process_that_maps(tmp_path / "libToolsInjection64.so") as pid:
        assert of(pid) == [("Nsight Systems", "libToolsInjection64.so")]


def test_a_program_with_cupti_that_uses_no_gpu_is_none(tmp_path: Path) -> None:
    with process_that_maps(tmp_path / "libcupti.so.12") as pid:
        assert of(pid) == []


def test_a_tools_own_program_is_known_by_its_name(tmp_path: Path) -> None:
    sleep = shutil.which("sleep")
    assert sleep
    (tmp_path / "nv-hostengine").symlink_to(sleep)
    with subprocess.Popen([tmp_path / "nv-hostengine", "60"]) as process:
        try:
            assert of(process.pid) == [("DCGM", "")]
            assert process.pid not in {each.pid for each in scan(own=frozenset({process.pid})).profilers}
        finally:
            process.kill()


def fake(proc: Path, pid: int, comm: str, maps: str = "", gpus: tuple[int, ...] = ()) -> None:
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "comm").write_text(f"{comm}\n")
    (folder / "cmdline").write_text(f"/usr/bin/{comm}\0--x\0")
    (folder / "maps").write_text(f"7f0000000000-7f0000001000 r-xp 00000000 08:01 7 {maps}\n" if maps else "")
    for number, gpu in enumerate(gpus):
        (folder / "fd" / str(number)).symlink_to(f"/dev/nvidia{gpu}")


def test_all_of_them_are_found_with_the_gpus_that_they_have_open(tmp_path: Path) -> None:
    fake(tmp_path, 5, "nv-hostengine", "/usr/lib/libdcgmmoduleprofiling.so.4", gpus=(0, 1))
    fake(tmp_path, 6, "simulation", "/opt/cuda/lib64/libcupti.so.13", gpus=(1,))
    fake(tmp_path, 7, "bash", "/usr/lib/libc.so.6")
    (tmp_path / "net").mkdir()
    assert scan(tmp_path).profilers == (
        ProfilingTool(product="DCGM", pid=5, library="libdcgmmoduleprofiling.so.4", gpus=(0, 1)),
        ProfilingTool(product="a program with CUPTI of its own", pid=6, library="libcupti.so.13", gpus=(1,)),
    )


def test_an_engine_that_only_its_socket_shows_is_found(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net/unix").write_text(
        "Num       RefCount Protocol Flags    Type St Inode Path\n"
        "0000000000000000: 00000002 00000000 00010000 0001 01 12345 /tmp/nv-hostengine\n"
    )
    assert scan(tmp_path).profilers == (ProfilingTool(product="DCGM", pid=0),)


def test_what_somebody_else_finds_in_hidden_processes_takes_the_place_of_their_names() -> None:
    open_to_us = ProfilingTool(product="Nsight Systems", pid=4, library="libToolsInjection64.so")
    by_name = (ProfilingTool(product="DCGM", pid=0), open_to_us, ProfilingTool(product="nvprof", pid=5))
    seen = Scan(profilers=by_name, hidden=(5, 6, 7)).joined(
        {4, 5, 6, 99},
        [
            ProfilingTool(product="DCGM", pid=6, gpus=(1,)),
            ProfilingTool(product="Nsight Compute", pid=4),  # it was not asked about that one
            ProfilingTool(product="nonsense", pid=6),
        ],
    )
    assert seen == Scan(profilers=(open_to_us, ProfilingTool(product="DCGM", pid=6, gpus=(1,))), hidden=(7,))


def test_a_process_that_has_ended_is_told_from_one_without_tools(tmp_path: Path) -> None:
    fake(tmp_path, 7, "bash", "/usr/lib/libc.so.6")
    assert look_into(7, tmp_path) == []
    with pytest.raises(FileNotFoundError):
        look_into(8, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_of_processes_that_may_not_be_looked_into_the_names_count_and_the_others_are_counted(tmp_path: Path) -> None:
    code = (
        "import json, sys; from kinetod.profilers.profiler_scan import scan; found = scan(); print(len(found.hidden))"
    )
    with process_that_maps(tmp_path / "libToolsInjection64.so"):
        done = subprocess.run(
            [*as_user(12345), sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, sys.path)))},
        )
    assert int(done.stdout) > 0
