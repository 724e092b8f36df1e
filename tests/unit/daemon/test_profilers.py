"""Other profilers among real processes, and in a folder that stands for /proc."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetod import profilers
from kinetod.attach.attach_types import Finding, Status
from kinetod.processes.profiler_signs import BY_PRODUCT
from kinetod.profilers import (
    Profiling,
    ProfilingTool,
    Scan,
    findings,
    library_finding,
    look_into,
    profiling,
    scan,
)
from support.service.daemon import as_user
from support.waiting import scaled

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


def test_a_program_is_known_by_the_kernels_name_and_by_that_it_was_started_by(tmp_path: Path) -> None:
    (tmp_path / "comm").write_text("python3\n")
    assert profilers._names(tmp_path) == {"python3"}
    (tmp_path / "cmdline").write_bytes(b"/opt/nsight/nsys\0profile\0")
    assert profilers._names(tmp_path) == {"python3", "nsys"}


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
        ProfilingTool(product="a program with its own CUPTI", pid=6, library="libcupti.so.13", gpus=(1,)),
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
    code = "import json, sys; from kinetod.profilers import scan; found = scan(); print(len(found.hidden))"
    with process_that_maps(tmp_path / "libToolsInjection64.so"):
        done = subprocess.run(
            [*as_user(12345), sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, filter(None, sys.path)))},
        )
    assert int(done.stdout) > 0


LIST = """\
+-----------+--------------------+--------------------------------------------------+
| List Modules                                                                      |
| Status: Success                                                                   |
+===========+====================+==================================================+
| Module ID | Name               | State                                            |
+-----------+--------------------+--------------------------------------------------+
| 0         | Core               | Loaded                                           |
| 1         | NvSwitch           | Loaded                                           |
| 7         | Diag               | Not loaded                                       |
| 8         | Profiling          | {state}                                     |
| 9         | SysMon             | Not loaded                                       |
+-----------+--------------------+--------------------------------------------------+
"""


def dcgmi(folder: Path, script: str) -> tuple[str]:
    path = folder / "dcgmi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return (str(path),)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("Loaded", Profiling.LOADED),
        ("Not loaded", Profiling.NOT_LOADED),
        ("Denylisted", Profiling.NOT_LOADED),
        ("Paused", Profiling.NOT_LOADED),
    ],
)
def test_the_state_of_the_module_is_told(tmp_path: Path, state: str, expected: Profiling) -> None:
    (tmp_path / "said").write_text(LIST.format(state=state))
    command = dcgmi(tmp_path, f'[ "$*" = "modules --list" ] && cat {tmp_path}/said')
    assert profiling(command, deadline_s=scaled(20)) == (expected, "")


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            "echo 'Error: unable to establish a connection to the specified host: localhost' >&2; exit 1",
            "unable to est",
        ),
        ("exit 3", "says: nothing"),
        ("echo '| 8 | Other | Loaded |'", "Other"),
    ],
)
def test_an_answer_without_it_is_unknown_with_the_reason(tmp_path: Path, script: str, why: str) -> None:
    state, text = profiling(dcgmi(tmp_path, script), deadline_s=scaled(20))
    assert state is Profiling.UNKNOWN
    assert why in text


def test_a_command_that_hangs_or_is_not_there_is_unknown(tmp_path: Path) -> None:
    assert profiling(dcgmi(tmp_path, "exec sleep 60"), deadline_s=0.1)[0] is Profiling.UNKNOWN
    state, text = profiling((str(tmp_path / "none"),))
    assert (state, "is not installed" in text) == (Profiling.UNKNOWN, True)


def one(*profilers: ProfilingTool, seen: bool = True, dcgm: Profiling | None = None) -> Finding:
    (found,) = findings(Scan(profilers=profilers), lambda _: seen, (dcgm, "why") if dcgm else None)
    assert found.name == "profilers"
    return found


def test_none_is_in_order_and_says_what_was_not_seen() -> None:
    (found,) = findings(Scan(hidden=tuple(range(1, 8))), lambda _: True, None)
    assert (found.status, found.detail) == (
        Status.OK,
        "none found; 7 processes of other users could be checked only by name",
    )


def test_dcgm_without_its_profiling_module_is_in_nobodys_way() -> None:
    assert one(ProfilingTool(product="DCGM", pid=5), dcgm=Profiling.NOT_LOADED).status is Status.OK


@pytest.mark.parametrize(
    ("dcgm", "says"),
    [
        (Profiling.LOADED, "has its profiling module loaded"),
        (Profiling.UNKNOWN, "(why)"),
        (None, "it was not queried"),
    ],
)
def test_dcgm_that_may_hold_counters_comes_with_the_command_that_frees_them(dcgm: Profiling | None, says: str) -> None:
    found = one(ProfilingTool(product="DCGM", pid=5, gpus=(0, 1)), dcgm=dcgm)
    assert found.status is Status.NOTE
    assert says in found.detail and "pid 5, with GPU 0, 1 open" in found.detail
    assert "`dcgmi profile --pause`" in found.advice


def test_processes_of_others_are_counted_but_not_named() -> None:
    found = one(
        ProfilingTool(product="Nsight Systems", pid=5), ProfilingTool(product="Nsight Systems", pid=6), seen=False
    )
    assert "2 processes of other users" in found.detail and "5" not in found.detail


def test_many_processes_are_not_all_named() -> None:
    found = one(*(ProfilingTool(product="Nsight Systems", pid=pid) for pid in range(1, 9)))
    assert "(pid 1, pid 2, pid 3, pid 4, pid 5, 3 more)" in found.detail


@pytest.mark.parametrize("product", BY_PRODUCT)
def test_every_tool_has_a_finding_and_none_is_a_problem_by_itself(product: str) -> None:
    assert one(ProfilingTool(product=product, pid=5)).status is Status.NOTE
    assert library_finding([product]).status in (Status.OK, Status.NOTE)


def test_in_a_process_only_a_tool_that_takes_cupti_is_worth_a_note() -> None:
    assert library_finding([]).detail == "none in it"
    assert library_finding(["a program with its own CUPTI"]).detail == "none in it"
    assert library_finding(["CUPTI's hardware counters"]).status is Status.OK
    assert library_finding(["Nsight Systems"]).status is Status.NOTE
