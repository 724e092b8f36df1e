"""A tracer that is stopped while a thread of the target stands still does not keep that thread."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from support.targets.engine_target import engine_target, needs_ptrace
from support.waiting import until

TRACER = """
import os, signal, sys, threading
from kinetod.attach.inject.ptrace import StoppedThread, in_own_thread
from kinetod.attach.inject.watchdog import WATCHDOG
pid, held = int(sys.argv[1]), sys.argv[2] == "held"
def work():
    with StoppedThread(pid, pid):
        if held: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread does not run a step further
    return 0
WATCHDOG.start()
in_own_thread(work)
print("let go", flush=True)
if not held: os.kill(os.getpid(), signal.SIGSTOP)
"""


def tracer(pid: int, what: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", TRACER, str(pid), what]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@needs_ptrace
def test_a_thread_is_let_go_when_its_tracer_is_stopped(tmp_path: Path) -> None:
    with engine_target(tmp_path, "") as target, tracer(target.process.pid, "held") as process:
        assert process.wait(30) == -signal.SIGKILL
        until(lambda: state(target.process.pid) in "RS", "the target does not run again")


@needs_ptrace
def test_a_tracer_that_holds_nothing_may_be_stopped(tmp_path: Path) -> None:
    with engine_target(tmp_path, "") as target, tracer(target.process.pid, "nothing") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "let go\n"
        until(lambda: state(process.pid) == "T", "the tracer has not stopped")
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(30) == 0


def test_the_watchdog_ends_with_its_process() -> None:
    script = "from kinetod.attach.inject.watchdog import WATCHDOG; WATCHDOG.start()"
    script += "; print(open('/proc/thread-self/children').read())"
    child = int(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True).stdout)
    until(lambda: not Path(f"/proc/{child}").exists(), "the watchdog is still there")
