"""`python -m kinetod.stacks.read_process`: reads the stacks of one process, in a process of its own.

Theory of operation
    The question is one line of JSON on standard input: {"pid", "uid", "deadline_s"}. Each line of the answer is a whole
    answer, and the last one is the best: first what the kernel tells of the threads, then their Python frames, too,
    then the code in those. So where a later step does not return, since the memory or a file of the process does not
    answer, what came before is still told.

    What the kernel tells is read before and after the frames. A thread that has moved in between stands nowhere: it
    runs, and its frames are those of some moment.

    Before it reads anything of the process's own, this process becomes the process's user, keeps CAP_SYS_PTRACE alone,
    without which Yama lets nobody read, and takes a system call filter that lets it read the memory of that one
    process; it can open no socket and signal nobody. Where it cannot become that user, it stays what it is. It ends
    itself at its deadline, and py-spy ends with it. The user may end it, too, and then has no stacks.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from kinetod.base.libc import PTRACE_CAPABILITY, become, keep_only
from kinetod.sandbox import seccomp_filter
from kinetod.sandbox.confinement import die_first_for_memory, die_with_parent, no_new_rights, set_limits
from kinetod.stacks import waits
from kinetod.stacks.python_frames import NoFrames, PythonThread, Sources, open_spy, read_frames
from kinetod.stacks.thread_facts import ThreadFacts, ThreadTable, read_process
from kinetod.stacks.thread_stacks import (
    MAX_ANSWER_BYTES,
    MAX_FRAMES,
    MAX_TEXT_CHARS,
    MAX_THREADS,
    NO_SUCH_PROCESS,
    StackFrame,
    StackReading,
    ThreadStack,
    encode,
)

_MEMORY_BYTES = 1 << 30
_CPU_S = 30
GIL_LOOKS_PER_S = 100  # of a thread that waits for the GIL: it looks every 5 ms


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
    _tell(joined(facts, (), "its Python frames could not be read in time"))
    python, why = list[PythonThread](), ""
    try:
        spy = open_spy()
        driver_calls = _driver_calls() if facts.uses_gpu else None
        confine(pid, uid)
        facts, began = read_process(pid, MAX_THREADS), time.monotonic()
        python = read_frames(pid, spy, facts.inner_pid)
        calls = driver_calls(facts, python) if driver_calls is not None else {}
        after = read_process(pid, MAX_THREADS)
        find_main(python, facts, after)
        facts = settled(facts, after, time.monotonic() - began)
        facts = replace(
            facts, threads=[replace(each, driver_call=calls.get(each.thread, "")) for each in facts.threads]
        )
    except NoFrames as exc:
        why = str(exc)
    except ProcessLookupError as exc:
        sys.stderr.write(str(exc))
        return NO_SUCH_PROCESS
    _tell(joined(facts, python, why))
    if python:
        Sources(pid).add_code(thread.frames for thread in python)
        _tell(joined(facts, python, why))
    return 0


def _driver_calls() -> Callable[[ThreadTable, Sequence[PythonThread]], dict[int, str]]:
    """The function of that name, which few processes need. The user may not be able to read its module."""
    from kinetod.stacks.driver_calls import driver_calls

    return driver_calls


def _tell(stacks: StackReading) -> None:
    most = MAX_FRAMES
    while len(line := encode(stacks)) > MAX_ANSWER_BYTES and most > 1:
        most //= 2
        for thread in stacks.threads:
            thread.left_out += max(0, len(thread.frames) - most)
            thread.frames = thread.frames[:most]
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def confine(pid: int, uid: int) -> None:
    """Permanently gives up everything but reading this process. Raises OSError."""
    die_first_for_memory()
    set_limits(
        {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_DATA: _MEMORY_BYTES,
            resource.RLIMIT_CPU: _CPU_S,
            resource.RLIMIT_FSIZE: 0,
        }
    )
    if uid != os.geteuid():
        with contextlib.suppress(PermissionError):
            become(uid)
    keep_only(PTRACE_CAPABILITY)
    die_with_parent()  # the change of user has ended that
    no_new_rights()
    if seccomp_filter.available():
        seccomp_filter.install(seccomp_filter.that_reads(pid))


def find_main(python: Sequence[PythonThread], before: ThreadTable, after: ThreadTable) -> None:
    """Numbers the main thread after a fork that Python was not told of, as in uWSGI: its number is the parent's."""
    numbers = {each.inner for table in (before, after) for each in table.threads}
    lost = [each for each in python if each.thread not in numbers]
    if len(lost) == 1 and all(each.thread != before.inner_pid for each in python):
        lost[0].thread = before.inner_pid


def settled(before: ThreadTable, after: ThreadTable, seconds: float) -> ThreadTable:
    """The threads as both looks tell them: one that has moved in between runs.

    A thread whose only movement is that it wakes every few milliseconds in the same call waits for the GIL, if another
    one holds it: its `wakes_per_s` is kept.
    """
    now = {each.thread: each for each in after.threads}
    return replace(before, threads=[_settled(each, now.get(each.thread), seconds) for each in before.threads])


def _settled(before: ThreadFacts, after: ThreadFacts | None, seconds: float) -> ThreadFacts:
    if after is None:
        return replace(before, state="ENDED", call=None)
    woken = after.switches - before.switches
    sleeps = before.call is not None and before.call.name in waits.SLEEPS  # if again and again, it tries something
    if (before.state, before.call) == (after.state, after.call) and (sleeps or not woken):
        return before
    undelayed_s = seconds - (after.delayed_ns - before.delayed_ns) / 1e9
    wakes_per_s = woken / max(undelayed_s, 1e-3)
    call = before.call or after.call  # on a busy machine it may wait for a processor at one of the looks
    if call is not None and {before.call, after.call} <= {call, None} and wakes_per_s > GIL_LOOKS_PER_S:
        state = before.state if before.call == after.call else "RUNNING"
        return replace(before, state=state, call=call, wakes_per_s=wakes_per_s)
    return replace(before, state="RUNNING", call=None)


def joined(facts: ThreadTable, python: Sequence[PythonThread], reason: str = "") -> StackReading:
    """The kernel's facts and the interpreter's frames, with what each thread waits for."""
    of = {thread.thread: thread for thread in reversed(python)}  # numbered as the process itself sees them
    holder = next((each for each in facts.threads if each.inner in of and of[each.inner].holds_gil), None)
    return StackReading(
        time_ns=time.time_ns(),
        threads=[_stack(thread, of, facts, holder) for thread in facts.threads],
        left_out=facts.left_out,
        reason=reason,
    )


def _place(frames: Sequence[StackFrame]) -> str:
    """Where a stack stands, as in " at train.py:6"; empty: nowhere in Python."""
    frame = next((each for each in frames if each.own), frames[0] if frames else None)
    return "" if frame is None else f" at {PurePosixPath(frame.file).name}:{frame.line}"


def _stack(
    thread: ThreadFacts, of: Mapping[int, PythonThread], facts: ThreadTable, holder: ThreadFacts | None
) -> ThreadStack:
    python, gil = of.get(thread.inner), ""
    frames = [] if python is None else python.frames
    if holder is not None and holder is not thread:
        gil = f"thread {holder.thread} ({holder.name}) holds{_place(of[holder.inner].frames)}"
    wait, words = waits.explain(thread, frames, facts, gil)
    return ThreadStack(
        thread=thread.thread,
        name=thread.name if python is None or not python.name else python.name,
        state=thread.state,
        cpu_ns=thread.cpu_ns,
        system_call=thread.call.name if thread.call is not None else "",
        holds_gil=thread is holder,
        wait=wait,
        waits=words[:MAX_TEXT_CHARS],
        frames=list(frames),
        left_out=0 if python is None else python.left_out,
    )


if __name__ == "__main__":
    sys.exit(main())
