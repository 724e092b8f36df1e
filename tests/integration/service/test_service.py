"""What the daemon and its service manager tell each other: readiness, status, watchdog, reload."""

import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod import __version__
from support.service.cli import run_process, wait_for_agent
from support.service.daemon import IMPORT_PATH, Daemon, running_daemon
from support.service.pseudo_terminal import in_terminal
from support.targets.programs import crunching, program
from support.waiting import scaled, until

WATCHDOG = {"WATCHDOG_USEC": "400000"}
FIVE_MINUTES = '[captures]\nmax_duration = "5min"\n'


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Path]]:
    """A daemon under a watchdog, and its configuration file."""
    file = tmp_path_factory.mktemp("config") / "config.toml"
    file.write_text(FIVE_MINUTES)
    with running_daemon("--config", str(file), "--decode-workers", "1", environ=WATCHDOG) as daemon:
        yield daemon, file


@pytest.fixture
def daemon(shared: tuple[Daemon, Path]) -> Daemon:
    return shared[0]


@pytest.fixture
def file(shared: tuple[Daemon, Path]) -> Path:
    return shared[1]


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def worker(daemon: Daemon) -> int:
    def found() -> int:
        for pid in children(daemon.pid):
            if b"kinetod.captures.result.decode_worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        return 0

    return until(found, "the daemon has a decode worker")


def pings(daemon: Daemon) -> int:
    return daemon.notified.count("WATCHDOG=1")


def says(daemon: Daemon, status: str) -> None:
    def last() -> str:
        return [each for each in daemon.notified if each != "WATCHDOG=1"][-1]

    until(lambda: last() == status, f"it says {status}", state=daemon.log)


def pinged(daemon: Daemon) -> None:
    before = pings(daemon)
    until(lambda: pings(daemon) > before + 1, "the watchdog is fed", state=daemon.log)


def host(daemon: Daemon) -> pb.Host:
    answer: pb.Host = daemon.stub().GetHost(pb.GetHostRequest())
    return answer


def reload(daemon: Daemon) -> None:
    """Returns once the daemon says that it is done."""
    before = len(daemon.notified)
    os.kill(daemon.pid, signal.SIGHUP)
    until(lambda: any("READY=1" in each for each in daemon.notified[before:]), "the reload ends", state=daemon.log)
    assert any(re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=\d+", each) for each in daemon.notified[before:])


@pytest.mark.slow
def test_the_watchdog_is_fed_while_all_parts_work_only(daemon: Daemon) -> None:
    healthy = "STATUS=0 agents, 0 captures running"
    assert daemon.notified[0] == f"READY=1\n{healthy}"
    pinged(daemon)
    no_socket = daemon.agent_socket.with_name("no-socket")
    no_socket.write_text("")
    no_socket.rename(daemon.agent_socket)
    sick = (
        f"{healthy}; unhealthy: agents cannot connect: the socket {daemon.agent_socket} is gone; "
        f"{daemon.agent_socket} exists but is not a socket; move it away or choose another path"
    )
    says(daemon, sick)
    daemon.agent_socket.unlink()
    says(daemon, healthy)
    looks = daemon.notified[daemon.notified.index(sick) : daemon.notified.index(healthy)]
    assert looks == [sick]
    assert daemon.agent_socket.is_socket()
    pinged(daemon)
    assert "everything works again" in daemon.log()


def test_a_decode_worker_that_was_killed_is_replaced_before_it_is_needed(daemon: Daemon) -> None:
    first = worker(daemon)
    os.kill(first, signal.SIGKILL)
    until(lambda: f"decode worker {first} died (exit status -9)" in daemon.log(), "it is missed")
    until(lambda: worker(daemon) != first, "another one is there")
    pinged(daemon)


def test_sighup_takes_over_what_can_change_and_names_what_waits(daemon: Daemon, file: Path) -> None:
    assert host(daemon).max_duration_ns == 300 * 10**9
    file.write_text('[captures]\nmax_duration = "7min"\nmax_captures = 7\n[attach]\nenabled = false\n')
    reload(daemon)
    assert host(daemon).max_duration_ns == 420 * 10**9
    assert 'captures.max_duration: "5min" → "7min"' in daemon.log()
    assert "attach.enabled: true → false takes effect at the next start" in daemon.log()
    assert "the configuration was reloaded: 2 keys changed" in daemon.log()
    file.write_text("[captures]\ndecode_workers = 2\n")
    reload(daemon)
    assert "captures.decode_workers" not in daemon.log()  # the option counts more than the file


def test_a_broken_file_keeps_the_running_configuration(daemon: Daemon, file: Path) -> None:
    file.write_text(FIVE_MINUTES)
    reload(daemon)
    file.write_text('[captures]\nmax_duration = "5 parsecs"\nmax_captures = 3\n')
    reload(daemon)
    assert host(daemon).max_duration_ns == 300 * 10**9
    problem = "captures.max_duration: '5 parsecs' is not a valid duration; expected for example 500ms, 5s or 10min"
    assert f"ERROR kinetod.config.config_sources: {file} line 2: {problem}" in daemon.log()
    file.unlink()
    reload(daemon)
    assert f"{file}: No such file or directory" in daemon.log()
    assert host(daemon).max_duration_ns == 300 * 10**9


@pytest.mark.slow
def test_a_daemon_whose_terminal_is_closed_stops(tmp_path: Path) -> None:
    keeper, terminal = pty.openpty()
    command = [sys.executable, "-m", "kinetod", "--listen", f"unix:{tmp_path}/r", "--agent-socket", f"{tmp_path}/a"]
    process = subprocess.Popen(
        [*command, "--state-dir", str(tmp_path / "state"), "--no-attach", "--log-level", "info"],
        env={**os.environ, "PYTHONPATH": IMPORT_PATH},
        stdin=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    seen = b""
    while b"is listening on" not in seen:
        seen += os.read(keeper, 4096)
    process.send_signal(signal.SIGHUP)
    while b"configuration was reloaded" not in seen:
        seen += os.read(keeper, 4096)
    os.close(keeper)
    process.send_signal(signal.SIGHUP)
    assert process.wait(scaled(20)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--log-level", "info")])
def test_a_terminal_gets_where_the_daemon_listens_and_more_only_on_request(options: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory(prefix="kinetod-") as root:
        daemon = Daemon(Path(root), ["--no-attach", "--decode-workers", "1", *options])
        with in_terminal(daemon.command(), daemon.client_environ()) as terminal:
            terminal.until(lambda _screen: "is listening on" in terminal.printed, "the daemon listens")
            with program(crunching(), daemon, quiet=True) as target:
                wait_for_agent(daemon, target.pid)
                arguments = ["trace", str(target.pid), "--duration", "10ms", "--output-dir", root]
                assert run_process(arguments, daemon.client_environ()).code == 0
            terminal.process.send_signal(signal.SIGTERM)
            assert terminal.ended() == 0
        assert "CreateCapture" in (daemon.state_dir / "audit.jsonl").read_text()
        assert "decision" not in terminal.printed
        if options:
            assert re.search(r"INFO .*: capture \S+: CAPTURE_STATUS_DONE", terminal.printed)
        else:
            assert terminal.printed == f"kinetod {__version__} is listening on {daemon.address}\r\n"


@pytest.mark.slow
def test_the_journal_gets_priorities(tmp_path: Path) -> None:
    with (tmp_path / "journal").open("wb") as journal:
        status = os.fstat(journal.fileno())
        environ = {**os.environ, "PYTHONPATH": IMPORT_PATH, "JOURNAL_STREAM": f"{status.st_dev}:{status.st_ino}"}
        options = ["--state-dir", str(tmp_path), "--agent-socket", f"{tmp_path}/no/such/agent.sock"]
        for extra in (["--listen", f"unix:{tmp_path}"], ["--config", str(tmp_path / "none")]):
            subprocess.run([sys.executable, "-m", "kinetod", *options, *extra], env=environ, stderr=journal)
    lines = (tmp_path / "journal").read_text().splitlines()
    assert lines and all(re.match(r"<[3-6]>", line) for line in lines), lines
    assert lines[-1].startswith(f"<3>kinetod: {tmp_path}/none: No such file")
