"""The proxy: to the daemon it is the agent of a process that has no Python."""

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kineto_agent.protocol import wire
from kineto_agent.sources.interface import SourceError, SourceRequest
from kinetod.agents.proxy_agent import RemoteCuptiSource, read_environ, thread_names
from kinetod.agents.proxy_pool import Proxies
from kinetod.attach.attach_types import AttachError
from kinetod.attach.channel.remote_collector import RemoteCollector
from kinetod.attach.inspect.cupti_search import find_cupti
from kinetod.processes.identity import ProcessKey, start_time_ns
from support.agent.arenas import ArenaReader
from support.machine import native
from support.targets.fake_program import FakeProgram, sockets
from support.waiting import scaled, soon, until

LIMIT_S = 20.0


@pytest.fixture
def program() -> Iterator[FakeProgram]:
    with FakeProgram(served=True, environ={"RANK": "3", "WORLD_SIZE": "8", "SLURM_JOB_ID": "7704"}) as started:
        yield started


class Link:
    """The daemon's end."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.socket.settimeout(scaled(LIMIT_S))

    def receive(self) -> tuple[wire.Message, list[int]]:
        """One message."""
        data, fds, _, _ = socket.recv_fds(self.socket, wire.MAX_FRAME_BYTES, 4)
        return wire.decode(data), list(fds)

    def expect(self, kind: type[wire.Message]) -> tuple[wire.Message, list[int]]:
        """The next message but for states."""
        while True:
            message, fds = self.receive()
            if not isinstance(message, wire.State):
                assert isinstance(message, kind), message
                return message, fds

    def start(self, duration_ns: int) -> None:
        """A capture of everything that is recorded by default."""
        self.socket.send(
            wire.encode(
                wire.Start("c1", [], duration_ns, None, None, 0, 0, 0, 0, 64 << 20, None, {}),
            )
        )

    def begin_long_capture(self) -> None:
        """Ends when it collects."""
        self.expect(wire.Hello)
        self.start(100 * 10**9)
        while True:
            message, fds = self.receive()
            for fd in fds:
                os.close(fd)
            if isinstance(message, wire.State) and message.state == "COLLECT":
                return


def with_proxy(program: FakeProgram, use: Callable[[Link, Proxies], None]) -> None:
    """Start a proxy, use it on a thread, wait for its end."""

    async def run() -> None:
        proxies = Proxies()
        link = Link(await proxies.start(ProcessKey(program.pid, start_time_ns(program.pid)), program.channel))
        await asyncio.to_thread(use, link, proxies)
        link.socket.close()
        await soon(lambda: not proxies.pids(), "the proxy has ended")

    asyncio.run(run())


def test_its_hello_describes_the_process(program: FakeProgram) -> None:
    def use(link: Link, _: Proxies) -> None:
        hello, _fds = link.expect(wire.Hello)
        assert isinstance(hello, wire.Hello)
        assert (hello.pid, hello.python_version, hello.framework) == (program.pid, "", "")
        assert (hello.rank, hello.world_size, hello.job_id, hello.iterations) == (3, 8, "7704", -1)
        assert Path(hello.argv[0]).name == "fake_cuda_program"
        assert list(hello.sources) == ["cupti"]
        assert "kernel" in hello.sources["cupti"]

    with_proxy(program, use)


def test_a_capture_goes_through_it(program: FakeProgram) -> None:
    def use(link: Link, _: Proxies) -> None:
        link.expect(wire.Hello)
        link.start(round(scaled(1) * 1e9))
        announced, (fd,) = link.expect(wire.Arena)
        assert isinstance(announced, wire.Arena)
        assert announced.format == "cupti/1"
        assert announced.metadata["devices"][0]["name"] == "Fake H200"
        result, _fds = link.expect(wire.Result)
        assert isinstance(result, wire.Result)
        assert (result.outcome, result.warnings) == ("done", [])
        assert result.sources["cupti"]["dropped"] == 0
        assert result.threads[str(program.pid)] == "fake_cuda_progr"
        assert {"kineto-agent", "fake_cuda_progr"} <= set(result.threads.values())
        with ArenaReader(fd) as reader:
            records = reader.records()
        os.close(fd)
        assert len(records[10]) > 20
        assert len(records[5]) > 20

    with_proxy(program, use)
    assert "finalized 1 misused 0" in program.ask("counts")


def test_when_the_link_is_closed_nothing_stays(program: FakeProgram) -> None:
    def use(link: Link, _: Proxies) -> None:
        link.begin_long_capture()

    with_proxy(program, use)
    until(lambda: not program.serves(), "the collector's thread has ended")
    assert sockets(program.pid) == []
    assert "finalized 1 misused 0" in program.ask("counts")


def test_a_killed_proxy_leaves_the_process_as_it_was(program: FakeProgram) -> None:
    def use(link: Link, proxies: Proxies) -> None:
        link.begin_long_capture()
        for pid in proxies.pids():
            os.kill(pid, signal.SIGKILL)

    with_proxy(program, use)
    until(lambda: not program.serves(), "the collector's thread has ended")
    assert "finalized 1 misused 0" in program.ask("counts")


def test_the_end_of_the_process_is_the_end_of_the_link(program: FakeProgram) -> None:
    def use(link: Link, _: Proxies) -> None:
        link.begin_long_capture()
        program.process.kill()
        link.socket.settimeout(scaled(LIMIT_S))
        while link.socket.recv(wire.MAX_FRAME_BYTES):
            pass
        assert program.process.wait() == -signal.SIGKILL

    with_proxy(program, use)


def test_without_a_libcupti_a_capture_is_refused_with_advice() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        source = RemoteCuptiSource(process.pid, {}, RemoteCollector(ours))
        assert "kernel" in source.activity_types()
        with pytest.raises(SourceError, match=r"libcupti was not found next to the process's CUDA") as caught:
            source.prepare(SourceRequest(frozenset(["kernel"]), 1 << 20, {}))
    assert caught.value.reason_code == "CUPTI_LIBRARY"


def test_a_proxy_that_cannot_be_started_is_an_error(program: FakeProgram) -> None:
    async def start() -> None:
        with pytest.raises(AttachError, match="cannot start a proxy for process"):
            await Proxies(command=["/nowhere/python"]).start(ProcessKey(program.pid, 1), program.channel)

    asyncio.run(start())


def test_variables_and_threads_of_another_process_are_read(program: FakeProgram) -> None:
    assert read_environ(program.pid)["SLURM_JOB_ID"] == "7704"
    assert thread_names(program.pid)[str(program.pid)] == "fake_cuda_progr"
    assert (read_environ(2**22 + 1), thread_names(2**22 + 1)) == ({}, {})


def fake_proc(folder: Path, *mapped: str) -> Path:
    """A /proc with process 7, which has these files mapped, and its file system."""
    (folder / "7" / "root").mkdir(parents=True)
    lines = [f"7f0000000000-7f0000001000 r-xp 00000000 00:00 0 {path}\n" for path in mapped]
    (folder / "7" / "maps").write_text("".join(lines))
    return folder


def put(proc: Path, path: str) -> None:
    """A file in the file system of process 7."""
    file = proc / "7" / "root" / path.lstrip("/")
    file.parent.mkdir(parents=True)
    file.touch()


def test_the_loaded_libcupti_is_used(program: FakeProgram) -> None:
    assert find_cupti(program.pid, {}) == str(native.fake_cupti())
    assert find_cupti(program.pid, {"KINETO_CUPTI_LIBRARY": "/mine.so"}) == "/mine.so"


def test_without_cuda_no_libcupti_is_looked_for(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, "/usr/lib/libc.so.6")
    put(proc, "/usr/local/cuda-13.0/extras/CUPTI/lib64/libcupti.so.13")
    assert find_cupti(7, {}, proc) is None


def test_folders_that_a_process_names_are_no_patterns(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, "/usr/lib/libcuda.so.1")
    put(proc, "/home/a/b/c/libcupti.so.12")
    for named in ("/**", "/home/*/*/*", "/home/[a]/b/c"):
        assert find_cupti(7, {"LD_LIBRARY_PATH": named, "CUDA_HOME": named}, proc) is None
    assert find_cupti(7, {"LD_LIBRARY_PATH": "/home/a/b/c"}, proc) == "/home/a/b/c/libcupti.so.12"


@pytest.mark.parametrize(
    ("path", "environ", "mapped"),
    [
        ("/usr/local/cuda-13.0/extras/CUPTI/lib64/libcupti.so.13", {}, []),
        ("/usr/local/cuda-12.6/targets/sbsa-linux/lib/libcupti.so.12", {}, []),
        ("/usr/lib/x86_64-linux-gnu/libcupti.so.12", {}, []),
        ("/opt/tools/lib64/libcupti.so.12", {"CUDA_HOME": "/opt/tools/"}, []),
        ("/app/lib/libcupti.so.12", {"LD_LIBRARY_PATH": "relative::/app/lib"}, []),
        ("/app/lib/libcupti.so.13", {}, ["/app/lib/libcudart.so.13"]),
        ("/v/nvidia/cuda_cupti/lib/libcupti.so.12", {}, ["/v/nvidia/cuda_runtime/lib/libcudart.so.12"]),
    ],
)
def test_a_libcupti_is_found_where_toolkits_have_it(
    tmp_path: Path, path: str, environ: dict[str, str], mapped: list[str]
) -> None:
    proc = fake_proc(tmp_path, "/usr/lib/libcuda.so.1", *mapped)
    put(proc, path)
    assert find_cupti(7, environ, proc) == path
