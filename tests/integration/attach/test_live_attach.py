"""A process that nobody prepared, traced by its pid through a real daemon: `python -c ...`, no variable, no path."""

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.machine.descriptors import open_files
from support.machine.kernel import allowed_to_trace
from support.service import cli, subjects
from support.service.cli import Result, run_process, wait_for_records
from support.service.daemon import Daemon, running_daemon
from support.waiting import scaled, until

LOOP = """
import os, sys
def train_step():
    return sum(range(2000))
print("ready", flush=True)
while True:
    train_step()
"""
# A main thread that runs no bytecode, as in a join() or a long wait for the device.
ASLEEP = """
import _thread
print("ready", flush=True)
lock = _thread.allocate_lock()
lock.acquire()
lock.acquire()
"""
# Patches where it is told to, and ends with what it found wrong.
GREEN = """
import contextlib, io, json, sys, warnings
from pathlib import Path
package, folder, first = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "first"
def patched():
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # eventlet says that nobody should use it, and which locks stay as they are
        if package == "eventlet":
            import eventlet
            eventlet.monkey_patch()
            return eventlet.GreenPool(8).imap
        import gevent.monkey
        gevent.monkey.patch_all()
        import gevent.pool
        return gevent.pool.Pool(8).map
def work(number):
    import time
    time.sleep(0.001)
    return number * sum(range(2000))
each, wrong = patched() if first else map, 0
print("ready", flush=True)
while not (folder / "stop").exists():
    if each is map and (folder / "patch").exists():
        each = patched()
        (folder / "patched").touch()
    wrong += list(each(work, range(8))) != [number * 1999000 for number in range(8)]
import threading
print(json.dumps([wrong, [thread.name for thread in threading.enumerate()]]), flush=True)
"""
CALLS = "--with-stack=trace"
C_LIBRARY_SIGNALS = 0b11 << 31  # 32 and 33: to cancel threads, and to change ids in all of them


pytestmark = pytest.mark.skipif(not allowed_to_trace(), reason="the kernel does not let us trace (ptrace_scope?)")


@contextmanager
def plain(program: str = LOOP, python: str = sys.executable) -> Iterator["subprocess.Popen[str]"]:
    """An unprepared process, which must live to the end of the test."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("KINETO", "PYTHON"))}
    process = subprocess.Popen([python, "-c", program], stdout=subprocess.PIPE, env=environ, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def kinetoctl(daemon: Daemon, *arguments: str) -> Result:
    return run_process(arguments, daemon.client_environ())


def trace(daemon: Daemon, pid: int, folder: Path, *options: str, duration: str = "300ms") -> dict[str, Any]:
    """The only target of a short trace that must be DONE."""
    arguments = ["--pid", str(pid), "--duration", duration, "--output-dir", str(folder), "-o", "json", *options]
    result = kinetoctl(daemon, "trace", *arguments)
    assert result.code == 0, result.stderr
    target: dict[str, Any]
    (target,) = result.json()["targets"]
    assert target["verdict"] == "VERDICT_DONE", target["reason"]
    return target


def agent_state(daemon: Daemon, pid: int) -> str:
    listed = kinetoctl(daemon, "ps", "--all", "--pid", str(pid), "-o", "json").json()
    assert isinstance(listed, list)
    return "attached" if listed[0]["attached"] else str(listed[0]["agent_state"])


def descriptors(pid: int) -> set[str]:
    return set(open_files(pid).values())


def blocked_signals(pid: int) -> list[int]:
    """Of each thread, signal 1 in bit 0."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        (line,) = (line for line in (task / "status").read_text().splitlines() if line.startswith("SigBlk:"))
        found.append(int(line.split()[1], 16))
    return found


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def test_an_unprepared_process_is_traced_by_its_pid(daemon: Daemon, tmp_path: Path) -> None:
    with plain() as process:
        target = trace(daemon, process.pid, tmp_path, duration="1s")  # of less, a busy machine may have no sample
        assert target["attach"]["method"] in ("pending-call", "native-thread")
        assert target["attach"]["latency_ns"] > 0
        assert target["process"]["attached"]
        (file,) = target["files"]
        events = json.loads(gzip.decompress(Path(file["path"]).read_bytes()))["traceEvents"]
        names = {event["name"] for event in events if event.get("cat") == "python_function"}
        assert any("train_step" in name for name in names)
        assert agent_state(daemon, process.pid) == "attached"


@pytest.mark.slow
def test_two_captures_in_a_row_use_the_same_agent(daemon: Daemon, tmp_path: Path) -> None:
    with plain() as process:
        assert trace(daemon, process.pid, tmp_path)["attach"] is not None
        assert trace(daemon, process.pid, tmp_path)["attach"] is None


@pytest.mark.slow
def test_a_daemon_that_keeps_no_agents_takes_a_trace(tmp_path: Path) -> None:
    with running_daemon("--keep-agent", "0s") as daemon, plain() as process:
        trace(daemon, process.pid, tmp_path)
        until(lambda: agent_state(daemon, process.pid) == "AGENT_STATE_NONE", "the agent is gone")


def test_with_debug_the_log_has_each_step_of_an_attach(tmp_path: Path) -> None:
    with running_daemon("--log-level", "debug") as daemon, plain() as process:
        trace(daemon, process.pid, tmp_path)
        until(lambda: "the agent has been sent" in daemon.log(), "the last step")
        steps = re.findall(rf"attach helper \d+: process {process.pid}: (.*)", daemon.log())
    assert steps[0].startswith("inspected: Python 3."), steps
    assert steps[-2:] == ["the injected code is running", "the agent has been sent"], steps
    stopped = re.compile(r"\w+: thread \d+ was stopped for \d+\.\d\d ms, try \d+")
    assert any(stopped.fullmatch(step) for step in steps[1:-2]), steps


def test_a_zombie_is_told_from_a_process_that_is_not_there(daemon: Daemon) -> None:
    with subjects.zombie() as pid:
        result = kinetoctl(daemon, "trace", "--pid", str(pid), "--duration", "300ms")
        assert result.code != 0
        assert (
            f"process {pid} is a zombie: it has ended, but its parent, process {os.getpid()}, has not reaped it"
            in result.stderr
        )
        assert "ATTACH_UNSUITABLE" in result.stderr


def test_a_process_whose_main_thread_has_ended_is_not_called_ended(daemon: Daemon) -> None:
    with subjects.without_main_thread() as pid:
        result = kinetoctl(daemon, "trace", "--pid", str(pid), "--duration", "300ms")
        assert result.code != 0
        assert f"process {pid} cannot be attached to: its main thread ended before its other threads" in result.stderr
        assert "ATTACH_UNSUITABLE" in result.stderr


def test_an_agent_that_is_not_kept_leaves_nothing_but_memory(daemon: Daemon, tmp_path: Path) -> None:
    with plain() as process:
        before = descriptors(process.pid), threads(process.pid)
        trace(daemon, process.pid, tmp_path, "--keep-agent", "0")
        until(lambda: agent_state(daemon, process.pid) == "AGENT_STATE_NONE", "the agent is gone")
        until(lambda: (descriptors(process.pid), threads(process.pid)) == before, "it has let go of everything")
        assert trace(daemon, process.pid, tmp_path, "--keep-agent", "0")["attach"] is not None


def test_a_main_thread_that_sleeps_is_no_obstacle(daemon: Daemon, tmp_path: Path) -> None:
    with plain(ASLEEP) as process:
        until(lambda: subjects.state(process.pid) == "S", "it sleeps")
        target = trace(daemon, process.pid, tmp_path)
        assert target["attach"]["method"] == "native-thread"
        # A thread that blocks the C library's own signals would make setuid() in the program wait for ever.
        assert not any(blocked & C_LIBRARY_SIGNALS for blocked in blocked_signals(process.pid))


@pytest.mark.slow
def test_an_agent_leaves_when_its_daemon_is_killed(tmp_path: Path) -> None:
    with running_daemon() as daemon, plain() as process:
        before = descriptors(process.pid), threads(process.pid)
        trace(daemon, process.pid, tmp_path)
        assert (descriptors(process.pid), threads(process.pid)) != before
        daemon.kill()
        until(lambda: (descriptors(process.pid), threads(process.pid)) == before, "the agent has left")
        daemon.start()
        assert trace(daemon, process.pid, tmp_path)["attach"] is not None


@pytest.mark.slow
def test_a_selector_finds_unprepared_processes_by_their_command(daemon: Daemon, tmp_path: Path) -> None:
    mark = f"mark-{os.getpid()}"
    with plain(f"# {mark}\n{LOOP}") as first, plain(f"# {mark}\n{LOOP}") as second:
        arguments = ["--command", mark, "--duration", "300ms", "--output-dir", str(tmp_path), "-o", "json"]
        result = kinetoctl(daemon, "trace", *arguments)
        targets = result.json()["targets"]
        assert result.code == 0, [target["reason"] for target in targets]
        assert {target["pid"] for target in targets} == {first.pid, second.pid}  # and not kinetoctl itself
        assert all(target["attach"] for target in targets)


@pytest.mark.slow
def test_attaching_can_be_switched_off(daemon: Daemon, tmp_path: Path) -> None:
    with plain() as process:
        result = kinetoctl(daemon, "trace", "--pid", str(process.pid), "--no-attach", "--output-dir", str(tmp_path))
        assert (result.code, result.stdout) == (5, "")
        assert "[NO_AGENT]" in result.stderr
        with running_daemon("--no-attach") as other:
            result = kinetoctl(other, "trace", "--pid", str(process.pid), "--output-dir", str(tmp_path))
        assert "[NO_AGENT]" in result.stderr


def test_a_process_without_python_and_cuda_is_refused_with_the_reason(daemon: Daemon, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        result = kinetoctl(daemon, "trace", "--pid", str(process.pid), "--output-dir", str(tmp_path))
        assert process.poll() is None
        process.kill()
    assert result.code == 5
    assert "[ATTACH_UNSUPPORTED]" in result.stderr


@contextmanager
def green(package: str, folder: Path, *start: str, first: bool, **variables: str) -> Iterator[int]:
    """The pid of such a program, which must have found nothing wrong and printed nothing at its end."""
    command = [*start, sys.executable, "-c", GREEN, package, str(folder), "first" if first else "later"]
    with (folder / "errors").open("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables or None)
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process.pid
            (folder / "stop").touch()
            output, _ = process.communicate(timeout=scaled(30))
            assert (process.returncode, json.loads(output)) == (0, [0, ["MainThread"]])
            assert (folder / "errors").read_text() == ""
        finally:
            process.kill()
            process.communicate()


def patch(folder: Path) -> None:
    (folder / "patch").touch()
    until((folder / "patched").exists, "the program has patched itself")


@pytest.fixture(params=["eventlet", "gevent"])
def package(request: pytest.FixtureRequest) -> str:
    if find_spec(request.param) is None:  # not imported here: eventlet makes every fork of this process warn
        pytest.skip(f"no {request.param}")
    return str(request.param)


@pytest.mark.slow
def test_green_threads_patched_before_the_attach_go_on(daemon: Daemon, package: str, tmp_path: Path) -> None:
    with green(package, tmp_path, first=True) as pid:
        assert trace(daemon, pid, tmp_path, CALLS)["warnings"] == []


@pytest.mark.slow
def test_green_threads_patched_while_the_agent_waits_go_on(daemon: Daemon, package: str, tmp_path: Path) -> None:
    with green(package, tmp_path, first=False) as pid:
        trace(daemon, pid, tmp_path, CALLS)
        patch(tmp_path)
        assert trace(daemon, pid, tmp_path, CALLS)["warnings"] == []


@pytest.mark.slow
def test_green_threads_patched_during_a_capture_go_on(daemon: Daemon, package: str, tmp_path: Path) -> None:
    with green(package, tmp_path, first=False) as pid, ThreadPoolExecutor(1) as other:
        capture = other.submit(trace, daemon, pid, tmp_path, CALLS, duration="3s")
        wait_for_records(daemon, pid)
        patch(tmp_path)
        assert capture.result()["warnings"] == []


@pytest.mark.slow
def test_green_threads_of_a_program_that_started_with_the_agent_go_on(
    daemon: Daemon, package: str, tmp_path: Path
) -> None:
    start = cli.kinetoctl("--quiet", "run", "--")
    with green(package, tmp_path, *start, first=True, **daemon.client_environ()) as pid:
        trace(daemon, pid, tmp_path, CALLS, "--no-attach")
        assert trace(daemon, pid, tmp_path, CALLS, "--no-attach")["warnings"] == []
