"""What /proc says of real processes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kinetod.attach.inspect import process_inspection
from kinetod.attach.inspect.process_inspection import Access, Seccomp, elf_kind, read_mapped, read_own, read_process
from support.machine import native
from support.machine.seccomp_host import Host, all_but
from support.service import subjects
from support.service.daemon import as_user
from support.waiting import until

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
HERE = os.uname().machine.replace("_", "-")


def test_a_python_process_of_ours() -> None:
    with subjects.python() as pid:
        found = read_process(pid)
        assert (found.pid, found.process_pid) == (pid, pid)
        assert found.state in "RS"
        assert found.uids == (os.geteuid(),) * 4
        assert not (found.kernel_thread or found.exiting or found.tracer_pid or found.no_new_privs)
        assert found.foreign_namespaces == ()
        assert found.namespace_pids[0] == pid
        assert found.seccomp == read_own().seccomp
        assert found.access is Access.ALLOWED
        assert found.executable is not None
        assert found.executable.path == str(Path(sys.executable).resolve())
        assert (found.executable.bits, found.executable.machine, found.executable.frozen) == (64, HERE, "")


def test_states_are_told_apart(tmp_path: Path) -> None:
    with subjects.zombie() as pid:
        assert read_process(pid).state == "Z"
        assert read_mapped(pid) is None
    with subjects.stopped() as pid:
        assert read_process(pid).state == "T"
    with subjects.uninterruptible(tmp_path) as pid:
        assert read_process(pid).state == "D"


def test_there_is_no_such_process() -> None:
    with pytest.raises(ProcessLookupError, match="there is no process 4194304"):
        read_process(2**22)


def test_the_tracer_is_named() -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    with subjects.traced() as (pid, tracer):
        found = read_process(pid)
        assert (found.tracer_pid, found.tracer_name) == (tracer, "strace")


def test_a_kernel_thread_is_one() -> None:
    if "kthreadd" not in (Path("/proc/2/comm").read_text() if Path("/proc/2/comm").exists() else ""):
        pytest.skip("kernel threads are not visible here")
    found = read_process(2)
    assert found.kernel_thread
    assert found.access is Access.UNKNOWN
    assert found.executable is None


def test_the_number_of_a_thread_is_no_process() -> None:
    with Host() as host:
        tid = host.ask("thread", program=all_but({}).hex())
        assert read_process(tid).process_pid == host.pid


def test_filters_and_no_new_privs_are_seen() -> None:
    with Host() as host:
        host.ask("install", program=all_but({}).hex())
        host.ask("install", program=all_but({}).hex())
        found = read_process(host.pid)
        assert found.seccomp == Seccomp(mode=2, filters=2 + read_own().seccomp.filters)
        assert found.no_new_privs


@root_only
def test_namespaces_of_its_own_are_seen() -> None:
    prefix = ("unshare", "--pid", "--fork", "--kill-child", "--net")
    with subjects.python(prefix=prefix) as parent:
        children = Path(f"/proc/{parent}/task/{parent}/children")
        (child,) = map(int, until(lambda: children.read_text().split(), "it has forked"))
        found = read_process(child)
        assert found.foreign_namespaces == ("pid", "net")
        assert found.namespace_pids == (child, 1)


@root_only
def test_a_process_that_is_not_dumpable_is_seen() -> None:
    for dumpable in (0, 1):
        program = f"import ctypes; ctypes.CDLL(None).prctl(4, {dumpable}, 0, 0, 0)"  # PR_SET_DUMPABLE
        with subjects.python(program, prefix=tuple(as_user(12345))) as pid:
            assert read_process(pid).dumpable is bool(dumpable)


def test_a_deleted_executable_is_seen(tmp_path: Path) -> None:
    program = tmp_path / "sleep"
    shutil.copy(subjects.SLEEP, program)
    with subjects.running(str(program), "1000") as pid:
        program.unlink()
        found = read_process(pid).executable
        assert found is not None
        assert (found.path, found.deleted, found.bits) == (str(program), True, 64)


def test_a_program_packed_by_pyinstaller_is_seen(tmp_path: Path) -> None:
    if shutil.which("objcopy") is None:
        pytest.skip("objcopy is not installed")
    program, archive = tmp_path / "app", tmp_path / "archive"
    archive.write_bytes(b"MEI")
    subprocess.run(["objcopy", "--add-section", f"pydata={archive}", subjects.SLEEP, program], check=True)
    with subjects.running(str(program), "1000") as pid:
        found = read_process(pid).executable
        assert found is not None
        assert found.frozen == "PyInstaller"


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        (b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x03\x00\x3e\x00", (64, "x86-64")),
        (b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xb7\x00", (64, "aarch64")),
        (b"\x7fELF\x01\x01\x01" + bytes(9) + b"\x02\x00\x03\x00", (32, "i386")),
        (b"\x7fELF\x01\x01\x01" + bytes(9) + b"\x02\x00\x28\x00", (32, "arm")),
        (b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00\xf3\x00", (64, "machine 243")),
        (b"#!/bin/sh\necho hello world", (0, "")),
        (b"", (0, "")),
    ],
)
def test_the_kind_of_an_elf_file(head: bytes, kind: tuple[int, str]) -> None:
    assert elf_kind(head) == kind


def test_what_is_loaded() -> None:
    cupti, cuda = native.fake_cupti(), native.fake_cuda()
    program = f"import ctypes; ctypes.CDLL({str(cuda)!r}, mode=ctypes.RTLD_GLOBAL); ctypes.CDLL({str(cupti)!r})"
    with subjects.python(program) as pid:
        found = read_mapped(pid)
        assert found is not None
        assert (found.libc, found.cuda, found.cupti) == ("glibc", (str(cuda),), str(cupti))
        assert (found.torch, found.other_python, found.gpu_files) == ("", "", ())


@pytest.mark.parametrize(
    ("name", "libc", "other"),
    [("ld-musl-x86_64.so.1", "musl", ""), ("libc-2.31.so", "glibc", ""), ("libpypy3.10-c.so", "", "PyPy")],
)
def test_libraries_are_known_by_their_names(tmp_path: Path, name: str, libc: str, other: str) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    (folder / "maps").write_text(f"7f0000000000-7f0000001000 r-xp 00000000 08:01 1234  /a b/lib/{name}\n")
    found = read_mapped(7, tmp_path)
    assert found is not None
    assert (found.libc, found.other_python) == (libc, other)


def test_ptrace_scope_is_read_where_there_is_one(tmp_path: Path) -> None:
    assert process_inspection.read_own(tmp_path).ptrace_scope is None
    yama = tmp_path / "sys/kernel/yama"
    yama.mkdir(parents=True)
    (yama / "ptrace_scope").write_text("1\n")
    assert process_inspection.read_own(tmp_path).ptrace_scope == 1


def test_the_environment_is_read() -> None:
    environ = process_inspection.environment(os.getpid())
    assert environ is not None
    assert "PATH" in environ
    assert process_inspection.environment(2**22) is None
