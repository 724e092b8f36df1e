"""The collector's way into a process without Python: the stub's machine code, the library, the words of failures."""

import importlib.util
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from kineto_agent.sources.cupti import cuda_devices
from kinetod.attach.attach_types import AttachCode, AttachError, Deadline
from kinetod.attach.channel.private_channel import await_channel
from kinetod.attach.channel.remote_collector import RemoteCollector
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.methods import collector_thread
from kinetod.attach.methods.collector_code import CODE
from support.machine import native
from support.machine.descriptors import open_files
from support.waiting import scaled, until

HARNESS = Path(__file__).parent / "native" / "run_stub.c"
GENERATOR = native.ROOT / "daemon" / "native" / "generate_stub_code.py"
MACHINE = os.uname().machine
pytestmark = pytest.mark.skipif(MACHINE not in CODE, reason="live attach does not know this machine")


def generator() -> ModuleType:
    """The development tool as a module."""
    spec = importlib.util.spec_from_file_location("generate_stub_code", GENERATOR)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Harness:
    """A C program that runs machine code on a thread."""

    def __init__(self) -> None:
        program = native.build("run_stub", [HARNESS], ["-O2"])
        self.process = subprocess.Popen([str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"
        self.pid = self.process.pid
        self.token = time.time_ns()

    def send(self, data: bytes) -> None:
        """To its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def run(self, code: bytes, argument: bytes) -> None:
        """Start the thread."""
        for data in (code, argument):
            self.send(struct.pack("=I", len(data)) + data)

    def wipe(self) -> None:
        """Take the code and the argument away from the running thread."""
        self.send(b"wipe\n")
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"wipe\n"

    def channel(self) -> socket.socket:
        """Our end."""
        found = await_channel(self.pid, self.token, Deadline(10))
        assert found is not None
        return found

    def descriptors(self) -> set[str]:
        """What its descriptors name, but for the standard ones."""
        return {name for number, name in open_files(self.pid).items() if number > 2}

    def threads(self) -> int:
        """How many there are."""
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))


@pytest.fixture
def harness() -> Iterator[Harness]:
    started = Harness()
    with started.process:
        try:
            yield started
        finally:
            started.process.kill()


@pytest.fixture(params=["committed", "compiled"])
def code(request: pytest.FixtureRequest) -> bytes:
    if request.param == "committed":
        return CODE[MACHINE]
    if shutil.which("gcc") is None or shutil.which("objcopy") is None:
        pytest.skip("needs gcc and binutils")
    module = generator()
    compiled: bytes = module.compile_stub(module.COLLECTOR, MACHINE)
    return compiled


def bring_in(harness: Harness, code: bytes) -> RemoteCollector:
    """As collector.bring_in, without a stop."""
    library = collector_thread.library(
        str(native.collector())
    )  # may have to be compiled; the thread waits for seconds only
    harness.run(code, collector_thread.argument(TargetImage(harness.pid), harness.token))
    channel = harness.channel()
    try:
        collector_thread.deliver(channel, harness.pid, library.fd, Deadline(10))
    except AttachError:
        channel.close()
        raise
    return RemoteCollector(channel)


def test_the_thread_serves_the_collector_without_its_code(harness: Harness, code: bytes) -> None:
    remote = bring_in(harness, code)
    harness.wipe()
    assert cuda_devices.describe(remote.device) == {"devices": []}
    assert (Path(f"/proc/{harness.pid}/task").is_dir(), harness.threads()) == (True, 2)
    assert len(harness.descriptors()) == 1
    remote.leave()
    until(lambda: harness.threads() == 1, "the thread has ended")
    assert harness.descriptors() == set()


def test_a_loaded_library_is_used_again(harness: Harness) -> None:
    remote = bring_in(harness, CODE[MACHINE])
    target = TargetImage(harness.pid)
    remote.leave()
    name = collector_thread.library(str(native.collector())).name
    (loaded,) = [path for path in target.modules if name in path]
    found = target.symbol_in((f"memfd:{name}",), "kc_serve")
    assert found is not None
    assert loaded == f"/memfd:{name} (deleted)"
    assert collector_thread.argument(target, 1, found[0])[40:48] == struct.pack("=Q", found[0])


def test_a_library_that_cannot_be_loaded_is_refused_in_the_loaders_words(harness: Harness, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF of no use" + bytes(100))
    harness.run(CODE[MACHINE], collector_thread.argument(TargetImage(harness.pid), harness.token))
    with harness.channel() as channel, pytest.raises(AttachError, match=r"cannot load the collector: .*ELF") as caught:
        collector_thread.deliver(channel, harness.pid, collector_thread.library(str(broken)).fd, Deadline(10))
    assert caught.value.code is AttachCode.FAILED
    until(lambda: harness.threads() == 1, "the thread has ended")
    assert harness.descriptors() == set()


def test_a_library_without_the_collector_is_refused(harness: Harness) -> None:
    harness.run(CODE[MACHINE], collector_thread.argument(TargetImage(harness.pid), harness.token))
    with harness.channel() as channel, pytest.raises(AttachError, match="undefined symbol: kc_serve"):
        collector_thread.deliver(
            channel, harness.pid, collector_thread.library(str(native.fake_cuda())).fd, Deadline(10)
        )


def test_a_thread_that_nobody_asks_ends_by_itself(harness: Harness) -> None:
    given = bytearray(collector_thread.argument(TargetImage(harness.pid), harness.token))
    struct.pack_into("=q", given, 48, 0)
    harness.run(CODE[MACHINE], bytes(given))
    until(lambda: harness.threads() == 1, "the thread has ended")
    assert harness.descriptors() == set()


def test_an_end_before_the_library_is_no_harm(harness: Harness) -> None:
    harness.run(CODE[MACHINE], collector_thread.argument(TargetImage(harness.pid), harness.token))
    with harness.channel() as channel:
        channel.shutdown(socket.SHUT_RDWR)
        until(lambda: harness.threads() == 1, "the thread has ended")
    assert harness.descriptors() == set()


def test_the_library_cannot_be_changed_by_a_target() -> None:
    fd = collector_thread.library(str(native.collector())).fd
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)


def test_a_statically_linked_program_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "static.c"
    source.write_text("#include <unistd.h>\nint main(void) { char c; return (int)read(0, &c, 1); }\n")
    try:
        program = native.build("static_program", [source], ["-static", "-O2"])
    except AssertionError:
        pytest.skip("this compiler cannot link statically")
    with subprocess.Popen([str(program)], stdin=subprocess.PIPE) as process:
        until(lambda: Path(f"/proc/{process.pid}/exe").readlink() == program, "it runs")
        with pytest.raises(AttachError, match=r"cannot load a library.*linked statically") as caught:
            collector_thread.argument(TargetImage(process.pid), 1)
    assert caught.value.code is AttachCode.UNSUPPORTED


SERVER = """
#include <sys/socket.h>
#include <unistd.h>
int kc_serve(int fd) {
    (void)send(fd, "served", 6, 0);
    return close(fd);
}
"""


@pytest.mark.parametrize("machine", sorted(CODE))
def test_the_code_does_its_work_on_each_machine(machine: str, tmp_path: Path) -> None:
    compiler = shutil.which(f"{machine}-linux-gnu-gcc")
    emulator = [] if machine == MACHINE else [shutil.which(f"qemu-{machine}"), "-L", f"/usr/{machine}-linux-gnu"]
    if compiler is None or None in emulator:
        pytest.skip(f"needs {machine}-linux-gnu-gcc, and qemu-user where this is another machine")
    (tmp_path / "server.c").write_text(SERVER)
    (tmp_path / "code").write_bytes(CODE[machine])
    source, headers = str(HARNESS.with_name("stub_alone.c")), f"-I{collector_thread.__file__.rpartition('/')[0]}"
    for command in (
        ["-shared", "-fPIC", "server.c", "-o", "server.so"],
        ["-O2", "-Wall", "-Wextra", "-Werror", headers, source, "-o", "alone", "-pthread", "-ldl"],
    ):
        subprocess.run([compiler, *command], cwd=tmp_path, check=True)
    said = []
    for library in ("server.so", "code"):
        command = [*filter(None, emulator), "./alone", "code", library]
        said.append(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(60)).stdout)
    assert said[0] == "served 1\n"
    assert re.fullmatch(r"E/proc/self/fd/\d+: invalid ELF header 1\n", said[1])


@pytest.mark.parametrize("machine", sorted(CODE))
def test_the_code_fits_into_the_end_of_a_page(machine: str) -> None:
    assert len(CODE[machine]) <= 1024
