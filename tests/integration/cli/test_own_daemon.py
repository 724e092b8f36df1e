"""Commands on a machine where no kinetod runs, each with a daemon of its own."""

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from kinetoctl.__main__ import main
from kinetoctl.client import tracing
from support.service import subjects
from support.service.cli import environment, kinetoctl, run_process
from support.small_disk import fill, small_disk
from support.waiting import scaled, until

NUMBERS = """
def crunch_numbers():
    return sum(i * i for i in range(20_000))
while True:
    crunch_numbers()
"""
SAID = "kinetod is not running here: starting one for the duration of this command"
pytestmark = pytest.mark.slow


@pytest.fixture
def pid() -> Iterator[int]:
    with subjects.running(sys.executable, "-c", NUMBERS) as started:
        yield started


@pytest.fixture
def temporary() -> Iterator[Path]:
    """For temporary folders; its name is short enough for sockets below it."""
    with tempfile.TemporaryDirectory(prefix="own-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def environ(tmp_path: Path, temporary: Path) -> dict[str, str]:
    """Where no daemon has its sockets."""
    changed = environment(XDG_RUNTIME_DIR=str(tmp_path), TMPDIR=str(temporary))
    return {name: value for name, value in changed.items() if name != "KINETO_ADDRESS"}


def daemons(temporary: Path) -> list[int]:
    commands = ((process.pid, process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"]))
    return [pid for pid, command in commands if any(str(temporary) in part for part in command)]


def test_a_trace_needs_no_daemon_and_leaves_none(
    pid: int, environ: dict[str, str], tmp_path: Path, temporary: Path
) -> None:
    arguments = ["trace", str(pid), "--duration", "1s", "--report", "--output-dir", str(tmp_path / "out")]
    result = run_process(arguments, environ)
    assert (result.code, result.stderr.splitlines()[0]) == (0, SAID), result
    assert "crunch_numbers" in result.stdout
    assert len(list((tmp_path / "out").iterdir())) == 1
    assert (list(temporary.iterdir()), daemons(temporary)) == ([], [])
    assert psutil.pid_exists(pid)


def test_the_verdict_stands_first_before_the_daemon_ends(
    pid: int,
    environ: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tracing, "ANSWER_LIMIT_S", scaled(60))
    monkeypatch.delenv("KINETO_ADDRESS", raising=False)
    for name in ("XDG_RUNTIME_DIR", "TMPDIR", "PYTHONPATH"):
        monkeypatch.setenv(name, environ[name])
    assert main(["trace", str(pid), "--duration", "1s", "--output-dir", str(tmp_path / "out")]) == 0
    verdict, separator, _ = capsys.readouterr().out.partition("\ncapture ")
    told = " ".join(verdict.splitlines())
    assert separator and "of the recorded time" in told
    assert "crunch_numbers" in told or "short of CPU" in told  # on a busy machine


@pytest.mark.parametrize("command", [["ps", "--all"], ["stacks"], ["doctor"], ["top", "--once", "--all"]])
def test_a_look_needs_none_either(command: list[str], pid: int, environ: dict[str, str], temporary: Path) -> None:
    result = run_process([*command, str(pid), "-q"], environ)
    assert (result.code, result.stderr) == (0, ""), result
    assert str(pid) in result.stdout
    assert (list(temporary.iterdir()), daemons(temporary)) == ([], [])


def test_what_must_outlast_the_command_needs_a_daemon_that_does(environ: dict[str, str], temporary: Path) -> None:
    for arguments in (["trace", "1", "--no-fetch"], ["captures", "list"]):
        result = run_process(arguments, environ)
        assert (result.code, "no daemon at" in result.stderr) == (7, True), result
    assert list(temporary.iterdir()) == []


def test_the_daemon_ends_with_a_command_that_is_killed(
    pid: int, environ: dict[str, str], tmp_path: Path, temporary: Path
) -> None:
    command = kinetoctl("trace", str(pid), "--duration", "60s", "--output-dir", str(tmp_path / "out"))
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("COLLECT" in line for line in process.stderr)
        assert daemons(temporary)
        process.send_signal(signal.SIGKILL)
    until(lambda: not daemons(temporary), "the daemon has ended")


def test_a_trace_that_does_not_fit_here_stays_with_what_the_daemon_had(pid: int, environ: dict[str, str]) -> None:
    with small_disk("size=64k") as out:
        fill(out)
        result = run_process(["trace", str(pid), "--duration", "1s", "-q", "--output-dir", str(out)], environ)
    assert (result.code, "is full" in result.stderr) == (5, True), result
    kept = re.search(r"start their daemon again: kinetod --state-dir (\S+)", result.stderr)
    assert kept is not None, result
    assert [path.name for path in Path(kept[1]).rglob("*.json.gz")]
