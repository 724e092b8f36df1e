"""Programs that hang in different ways, each told apart by a real daemon, from outside."""

import json
from collections.abc import Iterator

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl import api
from support.machine.pythons import python
from support.service.daemon import Daemon, running_daemon
from support.targets.hung_programs import PROGRAM, hanging
from support.targets.live_target import VERSIONS
from support.waiting import scaled, until

KINDS = {
    "lock": (pb.WAIT_LOCK, "waits for a lock"),
    "crossed_locks": (pb.WAIT_LOCK, "waits for a lock"),
    "condition": (pb.WAIT_LOCK, "waits for a condition or an event"),
    "gil_in_c": (pb.WAIT_GIL, "waits for the GIL, which thread"),
    "pipe": (pb.WAIT_FILE, "reads a pipe"),
    "full_queue": (pb.WAIT_QUEUE, "waits for room in a queue"),
    "child": (pb.WAIT_PROCESS, "waits for a child process"),
    "waitpid": (pb.WAIT_PROCESS, "waits for process "),
    "network": (pb.WAIT_NETWORK, "waits for data from 127.0.0.1:"),
    "process_queue": (pb.WAIT_PROCESS, "waits for another process"),
    "event_loop": (pb.WAIT_EVENTS, "waits in asyncio's event loop, where no task is ready"),
    "thread": (pb.WAIT_THREAD, "waits for another thread to end"),
    "sleep": (pb.WAIT_SLEEP, "sleeps"),
    "importing": (pb.WAIT_IMPORT, "waits for another thread's import"),
    "file_lock": (pb.WAIT_FILE, "waits for the lock of /"),
    "stopped": (pb.WAIT_STOPPED, "is stopped (SIGSTOP or Ctrl-Z)"),
}
OF_TORCH = {
    "gloo": (pb.WAIT_COLLECTIVE, "waits in all_reduce"),
    "loader": (pb.WAIT_WORKER, "waits for a DataLoader worker"),
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(environ={"KINETOD_ACCESS_REQUESTS_PER_SECOND": "1000"}) as running:
        yield running


def stacks(daemon: Daemon, pid: int) -> pb.ProcessStacks:
    request = pb.ReadStacksRequest(selector=pb.Selector(pids=[pid]))
    found: list[pb.ProcessStacks] = list(daemon.stub().ReadStacks(request, timeout=scaled(30)))
    assert len(found) == 1
    return found[0]


def told(daemon: Daemon, pid: int, wait: "pb.Wait", words: str) -> pb.ProcessStacks:
    """The stacks, once the main thread is told to wait so."""
    last: list[str] = []

    def found() -> pb.ProcessStacks | None:
        read = stacks(daemon, pid)
        main = read.threads[0]
        last[:] = [read.reason, main.waits, main.system_call, json.dumps([each.function for each in main.frames])]
        return read if main.wait == wait and main.waits.startswith(words) else None

    try:
        return until(found, f"it is told that it {words}")
    except TimeoutError as exc:
        raise AssertionError(last) from exc


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_program_hangs_in_is_told(daemon: Daemon, kind: str) -> None:
    with hanging(kind) as pid:
        found = told(daemon, pid, *KINDS[kind])
        own = [frame for frame in found.threads[0].frames if frame.own]
        assert found.threads[0].main
        assert own[0].function == ("never" if kind == "event_loop" and own[0].function == "never" else "hangs")
        assert not found.reason


@pytest.mark.parametrize("kind", OF_TORCH)
def test_what_a_program_of_torch_hangs_in_is_told(daemon: Daemon, kind: str) -> None:
    pytest.importorskip("torch")
    with hanging(kind) as pid:
        assert told(daemon, pid, *OF_TORCH[kind]).process.framework.startswith("torch")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_python_tells_where_a_lock_is_waited_for(daemon: Daemon, version: str) -> None:
    with hanging("lock", str(python(version))) as pid:
        found = told(daemon, pid, pb.WAIT_LOCK, "waits for a lock")
        frame = found.threads[0].frames[0]
        assert (frame.function, frame.code, frame.own) == ("hangs", "held.acquire()", True)
        assert PROGRAM.read_text().splitlines()[frame.line - 1].strip() == "held.acquire()"


def test_a_program_is_told_where_another_one_hangs(daemon: Daemon) -> None:
    with hanging("lock") as pid:
        told(daemon, pid, *KINDS["lock"])
        found = api.stacks(api.Selection(pids=(pid,)), api.HostOptions(address=daemon.address))
        line = found.processes[0]["threads"][0]["frames"][0]["line"]
        assert found.verdict == f"Process {pid} waits for a lock in hangs (hanging.py:{line})."
        assert found.complete and "held.acquire()" in found.text
        assert [each["place"]["function"] for each in found.groups] == ["hangs"]
