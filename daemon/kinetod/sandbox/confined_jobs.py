"""Runs each job in a process of its own, forked from a warm one and confined to the job's folder.

Theory of operation
    The warm process has done the slow imports and never reads hostile data. For each line of its input it forks; the
    child confines itself to the job's folder, does the job, and writes one line to its own pipe. The warm process
    passes the line on. So a compromised child can neither read other jobs nor answer them, and its changes in memory
    disappear with it. A child that dies is reported as {"id", "died": how}.

    A job is {"id", "target_dir", "memory_bytes", "cpu_s", "required", …}; all of it comes from the daemon. The warm
    process has one thread, so that a fork leaves nothing locked. A child dies with it.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from kinetod.base.libc import LIBC
from kinetod.sandbox.confinement import CannotConfine, Limits, close_descriptors, confine, prepare

MAX_ANSWER_BYTES = 16 << 20
_PR_SET_PDEATHSIG = 1
_STDOUT, _STDERR = 1, 2

Work = Callable[[str], str]


def die_with_parent() -> None:
    """Ends this process with its parent: otherwise it might keep writing where the next one does."""
    parent = os.getppid()
    LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the daemon is gone")


def serve(jobs: BinaryIO, answers: BinaryIO, work: Work) -> int:
    """Answers every line of `jobs` with one line, to the end. work: computes an answer from a job, in the sandbox."""
    prepare()
    for line in jobs:
        if line.strip():
            answers.write(_answer(line.decode(), work) + b"\n")
            answers.flush()
    return 0


def _answer(line: str, work: Work) -> bytes:
    job: dict[str, Any] = json.loads(line)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(job, line, work, writer)
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        answer = _read(pipe)
    if answer is None:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if status == 0 and answer:
        return answer
    how = "its answer is too long" if answer is None else _ending(status)
    return json.dumps({"id": job["id"], "died": how}).encode()


def _read(pipe: BinaryIO) -> bytes | None:
    """Returns the first line once the pipe ends; None: too much was written."""
    data = bytearray()
    while part := pipe.read(1 << 16):
        data += part
        if len(data) > MAX_ANSWER_BYTES:
            return None
    return bytes(data).partition(b"\n")[0]


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGKILL:
        return "killed, which the kernel does when memory is short"
    if code == -signal.SIGXCPU:
        return "ended for using too much processor time"
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _child(job: dict[str, Any], line: str, work: Work, writer: int) -> NoReturn:
    status = 1
    try:
        die_with_parent()
        close_descriptors((_STDOUT, _STDERR, writer))
        os.open(os.devnull, os.O_RDONLY)  # takes the number of the jobs pipe, so that no output file gets it
        limits = Limits(memory_bytes=job["memory_bytes"], cpu_s=job["cpu_s"], required=job["required"])
        try:
            confine(Path(job["target_dir"]), limits)
            answer = work(line)
        except CannotConfine as exc:
            answer = json.dumps({"id": job["id"], "ok": False, "reason_code": "NO_SANDBOX", "reason": str(exc)})
        _write(writer, answer.encode() + b"\n")
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it is, it must not get back into the warm process's loop
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
