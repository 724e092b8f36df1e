"""`python -m kinetod.stacks.read_process`: reads the stacks of one process, in a process of its own.

Theory of operation
    The question is one line of JSON on standard input: {"pid", "uid", "deadline_s"}. Each line of the answer is a whole
    answer, and the last one is the best: first what the kernel tells of the threads, then their Python frames, too,
    then the code in those. So where a later step does not return, since the memory or a file of the process does not
    answer, what came before is still told.

    pystack is C++ that reads structures and ELF files of a process that may be hostile. Before it does, this process
    becomes the process's user, keeps CAP_SYS_PTRACE alone, and takes a system call filter that lets it read the memory
    of that one process; it can open no connection, start no program and signal nobody. Where it may not become that
    user, it keeps its own. It ends itself at its deadline: its parent may not be allowed to kill another user's
    process.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from kinetod.base.libc import PTRACE_CAPABILITY, change_user, keep_capabilities
from kinetod.sandbox import seccomp_filter
from kinetod.sandbox.confinement import die_with_parent, no_new_rights
from kinetod.stacks import waits
from kinetod.stacks.python_frames import NoFrames, PythonThread, Sources, read_frames
from kinetod.stacks.thread_facts import ThreadFacts, ThreadTable, read_process, wakes
from kinetod.stacks.thread_stacks import MAX_THREADS, StackFrame, StackReading, ThreadStack, encode

NO_SUCH_PROCESS = 3
_OOM_FIRST = b"1000"
_MEMORY_BYTES = 1 << 30


def main() -> int:
    """Answers one question from standard input on standard output; 3 if there is no such process."""
    question = json.loads(sys.stdin.buffer.read())
    pid, uid = int(question["pid"]), int(question["uid"])
    signal.setitimer(signal.ITIMER_REAL, float(question["deadline_s"]))
    with contextlib.suppress(OSError):
        os.nice(5)  # the program has priority
    try:
        facts = read_process(pid, MAX_THREADS)
    except ProcessLookupError as exc:
        sys.stderr.write(str(exc))
        return NO_SUCH_PROCESS
    _tell(joined(facts, (), {}, "its Python frames could not be read in time"))
    try:
        import pystack.engine  # before the filter
        import pystack.errors  # noqa: F401

        confine(pid, uid)
        python, why = read_frames(pid), ""
    except ImportError:
        python, why = [], "its Python frames need pystack, which is not installed beside kinetod"
    except NoFrames as exc:
        python, why = [], str(exc)
    woken = wakes(facts)
    _tell(joined(facts, python, woken, why))
    if python:
        Sources(pid).add_code(thread.frames for thread in python)
        _tell(joined(facts, python, woken, why))
    return 0


def _tell(stacks: StackReading) -> None:
    sys.stdout.buffer.write(encode(stacks) + b"\n")
    sys.stdout.buffer.flush()


def confine(pid: int, uid: int) -> None:
    """Permanently gives up everything but reading this process. Raises OSError."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_OOM_FIRST)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
    if uid != os.geteuid():
        with contextlib.suppress(PermissionError):
            change_user(uid, keep=True)
    keep_capabilities(1 << PTRACE_CAPABILITY)
    die_with_parent()  # the change of user has ended that
    no_new_rights()
    if seccomp_filter.available():
        seccomp_filter.install(seccomp_filter.that_reads(pid))


def joined(
    facts: ThreadTable, python: Sequence[PythonThread], woken: Mapping[int, int], reason: str = ""
) -> StackReading:
    """The kernel's facts and the interpreter's frames, with what each thread waits for. woken: of `wakes`."""
    of = {thread.thread: thread for thread in python}  # numbered as the process itself sees them
    holder = next((each for each in facts.threads if each.inner in of and of[each.inner].holds_gil), None)
    return StackReading(
        time_ns=time.time_ns(),
        threads=[_stack(thread, of, facts, holder, woken.get(thread.thread, 0)) for thread in facts.threads],
        left_out=facts.left_out,
        reason=reason,
    )


def _place(frames: Sequence[StackFrame]) -> str:
    """Where a stack stands, as in " at train.py:6"; empty: nowhere in Python."""
    frame = next((each for each in frames if each.own), frames[0] if frames else None)
    return "" if frame is None else f" at {PurePosixPath(frame.file).name}:{frame.line}"


def _stack(
    thread: ThreadFacts, of: Mapping[int, PythonThread], facts: ThreadTable, holder: ThreadFacts | None, woken: int
) -> ThreadStack:
    python, gil = of.get(thread.inner), ""
    frames = [] if python is None else python.frames
    if holder is not None and holder is not thread:
        gil = f"thread {holder.thread} ({holder.name}) holds{_place(of[holder.inner].frames)}"
    wait, words = waits.explain(thread, frames, facts, gil, woken)
    return ThreadStack(
        thread=thread.thread,
        name=thread.name,
        state=thread.state,
        cpu_ns=thread.cpu_ns,
        system_call=thread.call.name if thread.call is not None else "",
        holds_gil=thread is holder,
        wait=wait,
        waits=words[:300],
        frames=frames,
        left_out=0 if python is None else python.left_out,
    )


if __name__ == "__main__":
    sys.exit(main())
