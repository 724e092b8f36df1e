"""Programs that hang in different ways, each told apart by a real daemon, from outside."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl import api
from support.machine.cgroups import frozen, real_group
from support.machine.pythons import python
from support.machine.silent_files import silent_file
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
    "child": (pb.WAIT_PROCESS, "waits for a child process to end"),
    "waitpid": (pb.WAIT_PROCESS, "waits for process "),
    "network": (pb.WAIT_NETWORK, "waits for data from 127.0.0.1:"),
    "process_queue": (pb.WAIT_PROCESS, "waits for another process"),
    "event_loop": (pb.WAIT_EVENTS, "waits in asyncio's event loop, with no task ready"),
    "thread": (pb.WAIT_THREAD, "waits for another thread to end"),
    "sleep": (pb.WAIT_SLEEP, "sleeps"),
    "importing": (pb.WAIT_IMPORT, "waits for another thread's import"),
    "file_lock": (pb.WAIT_FILE, "waits for the lock on /"),
    "stopped": (pb.WAIT_STOPPED, "is stopped (SIGSTOP or Ctrl-Z)"),
    "fork": (pb.WAIT_LOCK, "waits for a lock, with no other thread in the process"),
    "fork_in_c": (pb.WAIT_LOCK, "waits for a lock, with no other thread in the process"),
    "many_threads": (pb.WAIT_LOCK, "waits for a lock"),
    "c_with_gil": (pb.WAIT_SLEEP, "sleeps"),
    "full_pipe": (pb.WAIT_PROCESS, "waits for a child process to end"),
    "communicate": (pb.WAIT_PROCESS, "waits for the pipes of a child process"),
    "before_exec": (pb.WAIT_PROCESS, "waits for a child process to execute its program"),
    "spawn": (pb.WAIT_PROCESS, "waits for a new process to execute its program"),
    "process_lock": (pb.WAIT_LOCK, "waits for an inter-process lock or event"),
    "signals": (pb.WAIT_EVENTS, "waits for a signal"),
    "logging_lock": (pb.WAIT_LOCK, "waits for a lock"),
    "signal_handler": (pb.WAIT_LOCK, "waits for a lock"),
    "terminal": (pb.WAIT_FILE, "reads /dev/pts/"),
    "selects": (pb.WAIT_EVENTS, "waits until a file or a socket is ready"),
    "selector": (pb.WAIT_EVENTS, "waits for events"),
    "database": (pb.WAIT_SLEEP, "sleeps, as SQLite does while another connection locks its database"),
    "retries": (pb.WAIT_SLEEP, "sleeps"),
}
AT_EXIT = {  # no frame of the program's own is left
    "queue_at_exit": (pb.WAIT_QUEUE, "waits until an inter-process queue is flushed"),
    "thread_at_exit": (pb.WAIT_THREAD, "waits at exit for other threads to end"),
}
OF_SILENT_FILE = {
    "read_file": (pb.WAIT_FILE, "reads /"),
    "mapped_file": (pb.WAIT_KERNEL, "waits in the kernel, uninterruptibly, for a file, a driver or swapped memory ("),
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
        late = "in time" in read.reason  # without frames: the machine is busy
        return read if main.wait == wait and main.waits.startswith(words) and not late else None

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


@pytest.mark.parametrize("kind", AT_EXIT)
def test_what_a_program_hangs_in_at_its_end_is_told(daemon: Daemon, kind: str) -> None:
    with hanging(kind) as pid:
        assert not any(frame.own for frame in told(daemon, pid, *AT_EXIT[kind]).threads[0].frames)


@pytest.mark.parametrize("kind", OF_SILENT_FILE)
def test_a_file_that_does_not_answer_is_told(daemon: Daemon, kind: str, tmp_path: Path) -> None:
    with silent_file(tmp_path) as file, hanging(kind, str(file)) as pid:
        main = told(daemon, pid, *OF_SILENT_FILE[kind]).threads[0]
        assert main.state == pb.THREAD_STATE_UNINTERRUPTIBLE
        assert main.frames[0].function == "hangs"
        assert kind == "mapped_file" or main.waits == f"reads {file}"


@pytest.mark.parametrize("version", [1, 2])
def test_a_control_group_that_freezes_a_program_is_told(daemon: Daemon, version: int) -> None:
    with (
        hanging("lock") as pid,
        real_group("freezer", f"kineto-hangs-{version}-{pid}", version=version) as group,
    ):
        told(daemon, pid, *KINDS["lock"])  # it says that it hangs just before it does
        group.add(pid)
        with frozen(group):
            found = told(daemon, pid, pb.WAIT_STOPPED, "is frozen by a control group")
            assert found.threads[0].frames[0].function == "hangs"


def test_a_thread_that_waits_for_the_gil_names_the_call_of_c_that_has_it(daemon: Daemon) -> None:
    with hanging("c_with_gil") as pid:

        def both() -> Sequence[pb.ThreadStack] | None:
            threads = told(daemon, pid, pb.WAIT_SLEEP, "sleeps").threads
            return threads if threads[1].wait == pb.WAIT_GIL else None  # else it waits for a processor

        main, other = until(both, "the other one waits")
        line = main.frames[0].line
        assert main.holds_gil
        assert other.waits.partition(" (")[0] == f"waits for the GIL, which thread {pid}"
        assert other.waits.endswith(f" holds at hanging.py:{line}")


@pytest.mark.parametrize("kind", OF_TORCH)
def test_what_a_program_of_torch_hangs_in_is_told(daemon: Daemon, kind: str) -> None:
    pytest.importorskip("torch")
    with hanging(kind) as pid:
        assert told(daemon, pid, *OF_TORCH[kind]).process.framework.startswith("torch")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_python_tells_where_a_lock_is_waited_for(daemon: Daemon, version: str) -> None:
    with hanging("lock", interpreter=str(python(version))) as pid:
        found = told(daemon, pid, pb.WAIT_LOCK, "waits for a lock")
        frame = found.threads[0].frames[0]
        assert (frame.function, frame.code, frame.own) == ("hangs", "held.acquire()", True)
        assert PROGRAM.read_text().splitlines()[frame.line - 1].strip() == "held.acquire()"


def test_a_program_is_told_where_another_one_hangs(daemon: Daemon) -> None:
    with hanging("lock") as pid:
        told(daemon, pid, *KINDS["lock"])
        found = api.stacks(api.Selection(pids=(pid,)), api.HostOptions(address=daemon.address))
        line = found.processes[0]["threads"][0]["frames"][0]["line"]
        alone = ", with no other thread in the process,"
        assert found.verdict == f"Process {pid} waits for a lock{alone} in hangs (hanging.py:{line})."
        assert found.complete and "held.acquire()" in found.text
        assert [each["place"]["function"] for each in found.groups] == ["hangs"]
