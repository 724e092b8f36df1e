"""Processes whose libkineto polls the daemon: unmodified torch, imitators of it, and those that only would like to."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.base.libc import LIBC
from support.service.attach_service import unprivileged
from support.service.cli import run_process
from support.service.daemon import Daemon, child_environ, running_daemon
from support.waiting import scaled, slowdown, until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to have users and network namespaces")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
_CLONE_NEWNET = 0x40000000
SETTINGS = '[dynolog]\nipc = true\ncontainers = false\nsocket_dirs = ["{folder}"]\n'
# libkineto begins to poll when it is loaded, and goes on in a thread of its own.
TORCH = "import torch, sys; print(flush=True); sys.stdin.read()"
HOLD = """
import socket, sys
sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
sock.bind(b"\\0dynolog\\0")
print(flush=True)
sys.stdin.read()
"""
CLIENT = """
import pathlib, sys
from support.peers.libkineto import Libkineto
client = Libkineto(pathlib.Path(sys.argv[1]))
print(flush=True)
for line in sys.stdin:
    print(client.poll(), client.waited_s, flush=True)
client.close()
"""
FLOOD = """
import pathlib, sys
from support.peers.libkineto import Libkineto, poll
client = Libkineto(pathlib.Path(sys.argv[1]))
print(flush=True)
while True:
    client.send(poll())
"""
POLITE = """
import pathlib, sys, time
from support.peers.libkineto import Libkineto, poll
client = Libkineto(pathlib.Path(sys.argv[1]))
answered = 0
for _ in range(int(sys.argv[2])):
    for pause_s in (0.01 * 2**tries for tries in range(10)):  # as libkineto does where the queue is full
        client.sock.setblocking(False)
        try:
            client.send(poll())
        except BlockingIOError:
            time.sleep(pause_s)
            continue
        answered += client.receive(float(sys.argv[3])) is not None
        break
    time.sleep(0.3)  # more often is too often
print(answered)
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ipc-", dir="/tmp") as made:  # pytest's own are too long for sockets
        Path(made).chmod(0o1777)
        yield Path(made)


@pytest.fixture(scope="module")
def polled(folder: Path) -> Iterator[Daemon]:
    """A daemon that answers polls in the folder."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write(SETTINGS.format(folder=folder))
        config.flush()
        with running_daemon("--config", config.name) as daemon:
            yield daemon


@contextlib.contextmanager
def python(
    code: str, *arguments: str, prefix: Sequence[str] = (), **variables: str
) -> Iterator["subprocess.Popen[str]"]:
    """A process that has printed a line."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", code, *arguments],
        env=child_environ(**variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def in_a_network_of_its_own() -> Iterator[None]:
    """What this thread starts has another network namespace than the rest of this process."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        assert LIBC.unshare(_CLONE_NEWNET) == 0
        yield
    finally:
        assert LIBC.setns(before, _CLONE_NEWNET) == 0
        os.close(before)


def listed(daemon: Daemon, pid: int) -> dict[str, Any]:
    """The process as `kinetoctl ps` without options lists it; empty if it does not."""
    result = run_process(["ps", "-o", "json"], daemon.client_environ())
    found = [each for each in result.json() if each["pid"] == pid]
    return found[0] if found else {}


def check_of(daemon: Daemon, pid: int) -> pb.Check:
    found = daemon.stub().DiagnoseProcess(pb.DiagnoseProcessRequest(pid=pid), timeout=scaled(30))
    checks: list[pb.Check] = [each for each in found.checks if each.name == "libkineto"]
    assert len(checks) == 1
    return checks[0]


@pytest.mark.slow
@needs_torch
def test_unmodified_torch_polls_and_is_listed(polled: Daemon, folder: Path) -> None:
    variables = {"KINETO_USE_DAEMON": "1", "KINETO_IPC_SOCKET_DIR": str(folder), "SLURM_JOB_ID": "7703"}
    with python(TORCH, **variables) as first, python(TORCH, **variables) as second:
        for process in (first, second):
            until(lambda pid=process.pid: listed(polled, pid).get("kineto"), "torch polls", 60)  # type: ignore[misc]
        found = listed(polled, first.pid)
        assert (found["kineto"]["job_id"], found["kineto"]["last_poll_ns"] > 0) == (7703, True)
        before = found["kineto"]["last_poll_ns"]
        until(lambda: listed(polled, first.pid)["kineto"]["last_poll_ns"] > before, "it polls again")
        assert check_of(polled, first.pid).detail.startswith("its libkineto polls this daemon (last poll: ")
        table = run_process(["ps", "-o", "wide"], polled.client_environ()).stdout
        (row,) = [line.split() for line in table.splitlines() if line.split()[:1] == [str(first.pid)]]
        assert {"polls", "KINETO"} <= set(row), table
    until(lambda: not listed(polled, first.pid), "it has gone")


@pytest.mark.slow
@needs_root
@needs_torch
def test_unmodified_torch_polls_at_the_abstract_name() -> None:
    """The daemon and torch have a network namespace of their own: the name is one for the whole namespace."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write("[dynolog]\nipc = true\ncontainers = false\n")
        config.flush()
        with (
            in_a_network_of_its_own(),
            running_daemon("--config", config.name) as daemon,
            python(TORCH, KINETO_USE_DAEMON="1") as process,
        ):
            until(lambda: listed(daemon, process.pid).get("kineto"), "torch polls", 60)
            assert listed(daemon, process.pid)["pid"] == process.pid


@needs_root
def test_the_process_that_has_the_name_instead_is_named() -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as config:
        config.write("[dynolog]\nipc = true\ncontainers = false\n")
        config.flush()
        with in_a_network_of_its_own(), python(HOLD) as other, running_daemon("--config", config.name) as daemon:
            found = daemon.stub().DiagnoseHost(pb.DiagnoseHostRequest(), timeout=scaled(60)).checks
            said = [
                each.detail for each in found if each.status == pb.CHECK_STATUS_PROBLEM and each.name == "libkineto"
            ]
            problem = f"polls are not answered at the abstract socket @dynolog: process {other.pid} (python"
            assert [each[: len(problem)] for each in said] == [problem]
            assert f"not answered at the abstract socket @dynolog: process {other.pid} " in daemon.log()


def test_a_process_without_any_other_sign_is_listed_once_it_polls(polled: Daemon, folder: Path) -> None:
    with python(CLIENT, str(folder)) as process:
        assert listed(polled, process.pid) == {}
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("poll\n")
        process.stdin.flush()
        process.stdout.readline()
        found = until(lambda: listed(polled, process.pid), "it is listed")
        assert found["kineto"]["last_poll_ns"] > 0


def test_a_process_that_does_not_poll_is_told_why(daemon: Daemon, polled: Daemon) -> None:
    with python("import sys; print(flush=True); sys.stdin.read()", KINETO_USE_DAEMON="1") as process:
        assert check_of(daemon, process.pid).detail.endswith("does not poll this daemon: dynolog.ipc is off")
        result = run_process(["doctor", str(process.pid)], polled.client_environ())
        assert "started with KINETO_USE_DAEMON, but it does not poll this daemon" in " ".join(result.stdout.split())


def test_the_host_says_where_polls_are_answered(polled: Daemon, folder: Path) -> None:
    found = polled.stub().DiagnoseHost(pb.DiagnoseHostRequest(), timeout=scaled(60)).checks
    (served,) = [each for each in found if each.name == "libkineto" and each.status == pb.CHECK_STATUS_OK]
    assert str(folder) in served.detail
    off = run_process(["doctor", "-o", "json"], polled.client_environ())
    assert str(folder) in json.dumps(off.json())


@pytest.mark.slow
def test_64_processes_are_known_and_answered(polled: Daemon, folder: Path) -> None:
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(python(CLIENT, str(folder))) for _ in range(64)]
        for client in clients:
            assert client.stdin is not None
            client.stdin.write("poll\n")
            client.stdin.flush()
        for client in clients:
            assert client.stdout is not None
            assert client.stdout.readline().startswith(" "), "an answer without a configuration"
        until(lambda: polling(polled) >= {client.pid for client in clients}, "all are known")


def polling(daemon: Daemon) -> set[int]:
    request = pb.ListProcessesRequest(include_without_agent=True)
    found = daemon.stub().ListProcesses(request, timeout=scaled(30)).processes
    return {each.pid for each in found if each.HasField("kineto")}


@pytest.mark.slow
@needs_root
def test_a_user_who_floods_does_not_starve_another(polled: Daemon, folder: Path) -> None:
    flooding = unprivileged(64994, "dac_read_search")
    with python(FLOOD, str(folder), prefix=flooding), python(FLOOD, str(folder), prefix=flooding):
        polite = subprocess.run(
            [sys.executable, "-c", POLITE, str(folder), "20", str(scaled(1))],
            env=child_environ(),
            capture_output=True,
            text=True,
            check=True,
        )
        # of 20; the slower the machine, the more are looked at only when nobody waits for an answer any more
        assert int(polite.stdout) >= 15 / slowdown()
