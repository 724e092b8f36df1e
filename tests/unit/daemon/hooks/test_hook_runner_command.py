"""Programs that are run with a deadline and leave nothing behind."""

import asyncio
import gc
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from kinetod.hooks import hook_runner
from kinetod.hooks.hook_runner import MAX_OUTPUT_BYTES, NICE, Exit, last_line, run_program
from support.machine.descriptors import open_files
from support.waiting import scaled, soon, until

ENVIRON = {"PATH": os.environ["PATH"]}


def run(code: str, *arguments: str, data: bytes = b"", environ: Mapping[str, str] = ENVIRON) -> Exit:
    return asyncio.run(run_program((sys.executable, "-c", code, *arguments), data, environ, 60))


def test_a_program_gets_its_input_and_its_output_is_kept() -> None:
    data = b"x" * 300_000  # more than a pipe holds
    found = run(
        "import os, sys; print(len(sys.stdin.read()), os.environ['A'], os.getcwd())", data=data, environ={"A": "b"}
    )
    assert found == Exit(status=0, output=b"300000 b /\n")


def test_a_program_that_reads_nothing_is_no_problem() -> None:
    assert run("print('done')", data=bytes(1 << 20)).output == b"done\n"


def test_only_the_end_of_its_output_is_kept() -> None:
    found = run("import sys; sys.stdout.write('x' * 3_000_000 + 'end'); sys.exit(3)")
    assert found.status == 3
    assert len(found.output) == MAX_OUTPUT_BYTES
    assert found.output.endswith(b"end")


def test_it_has_a_low_priority() -> None:
    code = f"import os\nwhile os.getpriority(os.PRIO_PROCESS, 0) < {NICE}: pass\nprint('low')"
    assert run(code).output == b"low\n"


def test_at_its_deadline_it_is_asked_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_runner, "_TERM_GRACE_S", scaled(20))
    monkeypatch.setattr(hook_runner, "NICE", 0)  # at the lowest priority it starves beside other tests
    code = (
        "import os, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "print('ready', flush=True)\n"
        "os.mkdir(sys.argv[1])\n"
        "print(signal.sigwait([signal.SIGTERM]))\n"
    )

    async def late() -> Exit:
        ready, loop, timers = tmp_path / "ready", asyncio.get_running_loop(), list[float]()
        call_at = loop.call_at

        def noted(when: float, *arguments: Any, **options: Any) -> asyncio.TimerHandle:
            timers.append(when)
            return call_at(when, *arguments, **options)

        monkeypatch.setattr(loop, "call_at", noted)
        task = asyncio.create_task(run_program((sys.executable, "-c", code, str(ready)), b"", ENVIRON, 3600))
        await soon(
            lambda: ready.exists() and max(timers, default=0) > time.monotonic() + 3000,
            "the program is ready and waited for",
        )
        monkeypatch.setattr(loop, "time", lambda: time.monotonic() + 3600)
        return await task

    assert asyncio.run(late()) == Exit(status=None, output=b"ready\n15\n")


def test_what_it_leaves_behind_is_ended(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "child = os.fork()\n"
        "if child: open(sys.argv[1], 'w').write(str(child))\n"
        "else: signal.pause()\n"
    )
    assert run(code, str(tmp_path / "pid")).status == 0
    left = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{left}").exists() or _is_zombie(left), "the child is gone")


def _is_zombie(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def test_a_program_that_cannot_be_started_is_an_error_and_leaks_nothing() -> None:
    gc.collect()  # what other tests have left
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            asyncio.run(run_program(("/nonexistent/program",), b"x", ENVIRON, 1))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_caller_that_is_cancelled_at_any_moment_leaves_no_descriptor_behind() -> None:
    async def cancelled(turns: int) -> None:
        task = asyncio.create_task(
            run_program((sys.executable, "-c", "import signal; signal.pause()"), b"", ENVIRON, 60)
        )
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def scenario() -> None:
        await cancelled(0)
        gc.collect()  # what other tests have left
        before = len(open_files(os.getpid()))
        for turns in range(12):
            await cancelled(turns)
        assert len(open_files(os.getpid())) == before

    asyncio.run(scenario())


def test_when_the_caller_is_cancelled_it_is_ended(tmp_path: Path) -> None:
    code = "import os, signal, sys\nopen(sys.argv[1], 'w').write(str(os.getpid()))\nsignal.pause()"

    async def cancelled() -> None:
        task = asyncio.create_task(run_program((sys.executable, "-c", code, str(tmp_path / "pid")), b"", ENVIRON, 60))
        pid = tmp_path / "pid"
        await soon(lambda: pid.exists() and pid.read_text(), "the program has written its pid")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{pid}").exists() or _is_zombie(pid), "it is gone")


def test_a_secret_in_its_last_line_is_in_no_message() -> None:
    said = b"begin\ncurl: (22) https://me:abc123@host/x?sig=def456 X-Api-Key: ghi789 answered 403\n"
    shown = last_line(said)
    assert shown.startswith(": curl: (22) https://(hidden)@host/x?sig=(hidden)")
    assert not [secret for secret in ("abc123", "def456", "ghi789") if secret in shown]
