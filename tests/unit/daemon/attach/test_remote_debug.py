"""The interpreter's own slot for a script, in real CPython 3.14 and 3.15."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Iterator, List

import pytest
from kinetod.attach.image import TargetImage
from kinetod.attach.interface import AttachCode, AttachError, Bootstrap, Deadline, Stop
from kinetod.attach.remote_debug import RemoteDebug, find_slot
from support import newer_pythons

FIRST_TOKEN = time.time_ns()  # the files are those of this run alone
HEAD = "import signal, sys, time, threading\ndef say(what):\n  sys.stdout.write('%s\\n' % what); sys.stdout.flush()\n"
COUNT = "say('ready')\nn = 0\nwhile True: n += 1\n"
SLEEP = "say('ready')\nsys.stdin.readline()\nsay('awake')\nsys.stdin.readline()\n"
ALLOCATE = "say('ready')\nwhile True: x = [[str(i)] * 3 for i in range(50)]; x.append(x)\n"


class Target:
    """A Python program; its standard streams are pipes."""

    def __init__(self, command: List[str], program: str) -> None:
        self.process = subprocess.Popen(
            [*command, "-c", HEAD + program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.hear() == "ready"

    def __enter__(self) -> "Target":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.process.kill()
        self.process.communicate()

    @property
    def pid(self) -> int:
        return self.process.pid

    def say(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().rstrip("\n")

    def scripts(self) -> List[int]:
        """The tokens, counted as in this test, of the scripts that lie in its /tmp."""
        folder = Path(f"/proc/{self.pid}/root/tmp")
        found = [re.fullmatch(r"\.kineto-attach-(\d+)\.py", path.name) for path in folder.iterdir()]
        tokens = [int(match[1]) - FIRST_TOKEN for match in found if match]
        return [token for token in tokens if 0 <= token < 1000]


def commands() -> Iterator[object]:
    """Each version with a shared libpython in place, and statically linked in another root file system."""
    for version in newer_pythons.VERSIONS:
        missing = pytest.mark.skipif(
            newer_pythons.find(version) is None, reason=f"no CPython {version}: {newer_pythons.MAKE}"
        )
        yield pytest.param([str(newer_pythons.find(version))], id=f"{version}-shared", marks=missing)
        marks = [missing, pytest.mark.skipif(os.geteuid() != 0, reason="another root file system takes root")]
        root = str(newer_pythons.ROOT)
        yield pytest.param(["chroot", root, f"/usr/bin/python{version}"], id=f"{version}-static", marks=marks)


every_python = pytest.mark.parametrize("command", list(commands()))


@pytest.fixture
def python() -> List[str]:
    found = newer_pythons.find("3.14")
    if found is None:
        pytest.skip(f"no CPython 3.14: {newer_pythons.MAKE}")
    return [str(found)]


def hand_over(method: RemoteDebug, target: Target, token: int, source: str) -> Stop:
    return method.hand_over(TargetImage(target.pid), Bootstrap(FIRST_TOKEN + token, source.encode()), Deadline(10))


def refusal(target: Target) -> AttachError:
    with pytest.raises(AttachError) as caught:
        hand_over(RemoteDebug(), target, 1, "sys.stdout.write('never')")
    return caught.value


def announce(token: int) -> str:
    return f"import sys; sys.stdout.write('{token}\\n'); sys.stdout.flush()"


@every_python
@pytest.mark.parametrize("program", [COUNT, ALLOCATE])
def test_each_script_runs_once_without_a_stop(command: List[str], program: str) -> None:
    method = RemoteDebug()
    with Target(command, program) as target:
        for token in range(1, 51):
            assert hand_over(method, target, token, announce(token)) == Stop(tid=0, stopped_ns=0, attempts=1)
            assert target.hear() == str(token)
            method.finish()
        assert target.scripts() == []


@every_python
def test_a_script_that_is_given_up_never_runs_and_leaves_nothing(command: List[str]) -> None:
    method = RemoteDebug()
    with Target(command, SLEEP) as target:
        hand_over(method, target, 1, announce(1))
        assert target.scripts() == [1]
        method.finish()
        method.finish()
        assert target.scripts() == []
        target.say()
        assert target.hear() == "awake"
        output, errors = target.process.communicate(b"\n", timeout=10)
        assert (output, errors, target.process.returncode) == (b"", b"", 0)


def test_what_a_killed_helper_has_left_is_taken_over(python: List[str]) -> None:
    with Target(python, SLEEP) as target:
        hand_over(RemoteDebug(), target, 1, announce(1))  # nobody finishes it
        method = RemoteDebug()
        hand_over(method, target, 2, announce(2))
        assert target.scripts() == [2]
        target.say()
        assert [target.hear(), target.hear()] == ["2", "awake"]
        method.finish()
        assert target.scripts() == []


def test_a_helper_killed_after_its_script_ran_leaves_a_file_that_the_next_one_removes(python: List[str]) -> None:
    with Target(python, COUNT) as target:
        hand_over(RemoteDebug(), target, 1, announce(1))
        assert target.hear() == "1"
        method = RemoteDebug()
        hand_over(method, target, 2, announce(2))
        assert target.scripts() == [2]
        method.finish()


def test_another_tool_s_script_is_left_to_run(python: List[str], tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.py"
    theirs.write_text(announce(77))
    with Target(python, SLEEP) as target:
        image = TargetImage(target.pid)
        slot = find_slot(image)
        image.memory.write(slot.path, str(theirs).encode() + b"\0")
        image.memory.write(slot.flag, b"\1\0\0\0")
        error = refusal(target)
        assert (error.code, str(theirs) in error.reason) == (AttachCode.FAILED, True)
        assert target.scripts() == []


@pytest.mark.parametrize("command", [["-X", "disable-remote-debug"], ["env", "PYTHON_DISABLE_REMOTE_DEBUG=1"]])
def test_remote_debugging_that_is_switched_off_is_respected(python: List[str], command: List[str]) -> None:
    with Target([*command, *python] if command[0] == "env" else [*python, *command], SLEEP) as target:
        error = refusal(target)
        assert error.code == AttachCode.UNSUPPORTED
        assert error.reason.endswith(
            "remote debugging is switched off (PYTHON_DISABLE_REMOTE_DEBUG, -X disable-remote-debug, or its build)"
        )
        assert target.scripts() == []


def test_an_older_python_has_no_slot() -> None:
    if sys.version_info >= (3, 14):
        pytest.skip("this is no older Python")
    with Target([sys.executable], SLEEP) as target:
        assert refusal(target).code == AttachCode.UNSUPPORTED


def test_a_script_is_not_run_by_another_interpreter_s_thread(python: List[str]) -> None:
    program = (
        "import concurrent.interpreters as i\n"
        "other = i.create(); t = other.call_in_thread(exec, 'import time; time.sleep(60)')\n" + COUNT
    )
    method = RemoteDebug()
    with Target(python, program) as target:
        hand_over(method, target, 1, "import sys, _interpreters as i; print(i.get_current()[0], flush=True)")
        assert target.hear() == "0"
        method.finish()


def test_no_request_for_the_gil_is_made_up(python: List[str]) -> None:
    # A request that nobody has would make the thread wait for a switch that never comes.
    program = (
        "def nap():\n  while True: time.sleep(0.0007)\nthreading.Thread(target=nap, daemon=True).start()\n" + COUNT
    )
    method = RemoteDebug()
    with Target(python, program) as target:
        for token in range(1, 301):
            hand_over(method, target, token, announce(token))
            assert target.hear() == str(token)
            method.finish()


def test_no_signal_is_lost(python: List[str]) -> None:
    program = "signal.signal(signal.SIGUSR1, lambda *a: say('signal'))\n" + COUNT
    method = RemoteDebug()
    with Target(python, program) as target:
        for token in range(1, 201):
            sender = threading.Thread(target=os.kill, args=(target.pid, signal.SIGUSR1))
            sender.start()
            hand_over(method, target, token, announce(token))
            sender.join()
            assert {target.hear(), target.hear()} == {"signal", str(token)}
            method.finish()


def test_a_target_without_a_writable_place_is_refused_and_left_alone(python: List[str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("a read-only file system takes root")
    read_only = "for place in /tmp /dev/shm /var/tmp; do mount -t tmpfs -o ro none $place; done"
    command = ["unshare", "--mount", "sh", "-c", f'{read_only}; mount -o remount,bind,ro /; cd /; exec "$@"', "sh"]
    with Target([*command, *python], COUNT) as target:
        error = refusal(target)
        assert error.code == AttachCode.FAILED
        assert "no directory takes a script" in error.reason
