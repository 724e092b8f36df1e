"""Permanently confines a process to one folder: files by Landlock, system calls by seccomp, sizes by limits.

Theory of operation
    `confine` is called between fork and the first byte of hostile data, while the process has one thread. The order
    matters: things that later steps need (descriptors of rules, /proc/self/oom_score_adj) become inaccessible.

    It keeps: its folder; read access to the code of this Python and the system's libraries; its pipes; memory and CPU
    time up to its limits. stat still reveals whether a path exists. Everything else is inaccessible: files of other
    captures, sockets of any kind, other processes, capabilities, new programs. If the kernel lacks a part, the others
    still apply; `required` makes that an error instead.

    `serve` runs each job in a process of its own, forked from a warm one and confined to the job's folder. The warm
    process has done the slow imports and never reads hostile data. For each line of its input it forks; the child
    confines itself to the job's folder, does the job, and writes one line to its own pipe. The warm process passes the
    line on. So a compromised child can neither read other jobs nor answer them, and its changes in memory disappear
    with it. A child that dies is reported as {"id", "died": how}.

    A job is {"id", "target_dir", "memory_bytes", "cpu_s", "required", …}, and {"reads_only": true} for one that changes
    nothing in its folder; all of it comes from the daemon. The warm process has one thread, so that a fork leaves
    nothing locked. A child dies with it.
"""

import contextlib
import functools
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from kinetod.base.libc import LIBC, drop_capabilities, prctl
from kinetod.sandbox import landlock, seccomp_filter
from kinetod.sandbox import seccomp_filter as seccomp

# For the libraries of a process that will be confined: none may start a thread before, nor reserve address space that
# counts as its memory.
ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
_CODE_FOLDERS = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/local/lib")
_CODE_FILES = ("/etc/ld.so.cache", "/dev/null", "/dev/urandom", "/proc/self/statm")
_OPEN_FILES = 256
_CHEAP_BYTES = 1 << 30  # any trace may have outputs of this size,
_OUTPUT_FACTOR = 64  # or this many times its records: 48 bytes become a Chrome event with a name of 2 KiB
_OOM_FIRST = b"1000"  # if memory is short, the kernel kills this process and no other
_TCP_ABI, _SIGNAL_ABI = 4, 6
MAX_ANSWER_BYTES = 16 << 20
_PR_SET_PDEATHSIG = 1
_STDOUT, _STDERR = 1, 2

Work = Callable[[str], str]


class CannotConfine(Exception):
    """A required part of the sandbox is unavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one decode. memory_bytes: private memory. required: fail if the kernel lacks a part of the sandbox."""

    memory_bytes: int
    cpu_s: int
    required: bool = False


def prepare() -> None:
    """Prepares the parts common to all jobs in the warm process: finds the code and builds the filter."""
    _code_folders()
    if seccomp_filter.available():
        seccomp_filter.prepare()


def confine(folder: Path, limits: Limits, readable: Iterable[Path] = (), *, writes: bool = True) -> None:
    """Permanently confines this process to this folder, and to reading these files. Raises CannotConfine, OSError.

    writes: whether it may change the folder.
    """
    own = folder.resolve()
    die_first_for_memory()
    _set_limits(own, limits)
    drop_capabilities()
    no_new_rights()
    version = landlock.abi()
    if version:
        reads = [(path, landlock.READ) for path in readable]
        landlock.restrict([*code(own), *reads, (own, landlock.OWN if writes else landlock.READ)], version)
    elif limits.required:
        raise CannotConfine('this kernel has no Landlock, and captures.decode_sandbox is "required"')
    if seccomp_filter.available():
        seccomp_filter.install()
    elif limits.required:
        raise CannotConfine('this kernel has no seccomp filters, and captures.decode_sandbox is "required"')


def close_descriptors(keep: Collection[int]) -> None:
    """Closes all descriptors but these: no pipe, socket or file of the parent stays open."""
    for descriptor in {int(entry.name) for entry in Path("/proc/self/fd").iterdir()} - set(keep):
        with contextlib.suppress(OSError):  # the descriptor used for listing them
            os.close(descriptor)


def code(own: Path) -> Iterator[tuple[Path, int]]:
    """Folders of code that may be loaded late, none of them secret; never the store, whatever sys.path contains."""
    for folder in _code_folders():
        if not own.is_relative_to(folder):
            yield folder, landlock.READ
    for name in _CODE_FILES:
        yield Path(name), landlock.READ


@functools.cache
def _code_folders() -> tuple[Path, ...]:
    folders = {Path(entry).resolve() for entry in (*sys.path, *_CODE_FOLDERS) if entry}
    return tuple(sorted(folders | {Path(sys.base_prefix, "lib").resolve()}))


def die_first_for_memory() -> None:
    """Lets the kernel kill this process and no other where memory is short."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_OOM_FIRST)


def most_output_bytes(target_dir: Path) -> int:
    """More than any trace of this target's records needs. Raises OSError."""
    from kineto_trace.model.target_info import raw_bytes  # 40 ms that only a decoder needs, which has loaded it

    return _CHEAP_BYTES + _OUTPUT_FACTOR * raw_bytes(target_dir)


def _set_limits(own: Path, limits: Limits) -> None:
    wanted = {
        resource.RLIMIT_CORE: 0,  # a core dump contains data of a target, which belongs to its owner
        resource.RLIMIT_DATA: limits.memory_bytes,
        resource.RLIMIT_CPU: limits.cpu_s,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_FSIZE: most_output_bytes(own),
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    set_limits(wanted)


def set_limits(wanted: Mapping[int, int]) -> None:
    """Sets limits for good, or lower ones that hold already. wanted: by RLIMIT_*."""
    for which, value in wanted.items():
        _, hard = resource.getrlimit(which)
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (least, least))


def no_new_rights() -> None:
    """Forbids new rights, and tracing by other processes of the same user."""
    prctl(_PR_SET_DUMPABLE, 0)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """landlock: its ABI; 0: there is none."""

    landlock: int
    seccomp: bool

    @property
    def missing(self) -> tuple[str, ...]:
        """The missing parts, each with its cost; empty if decoders are confined as documented."""
        lacking = []
        if not self.landlock:
            lacking.append("without Landlock, a compromised decoder could read all files of the daemon's user")
        if not self.seccomp:
            lacking.append("without seccomp filters, a compromised decoder could open connections and send signals")
        return tuple(lacking)

    @property
    def present(self) -> str:
        """The parts that the kernel supports, for people."""
        parts = []
        if self.landlock:
            more = [name for name, since in (("TCP", _TCP_ABI), ("signals", _SIGNAL_ABI)) if self.landlock >= since]
            parts.append(f"Landlock ABI {self.landlock} (files{''.join(f', {name}' for name in more)})")
        if self.seccomp:
            parts.append("a seccomp filter")
        return ", ".join([*parts, "resource limits"])


def support() -> Support:
    """What this kernel supports, under the daemon's own filters."""
    return Support(landlock=landlock.abi(), seccomp=seccomp.available())


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
        return "killed, possibly by the kernel because memory was short"
    if code == -signal.SIGXCPU:
        return "killed for using too much CPU time"
    return f"signal {-code}" if code < 0 else f"exit status {code}"


def _child(job: dict[str, Any], line: str, work: Work, writer: int) -> NoReturn:
    status = 1
    try:
        die_with_parent()
        close_descriptors((_STDOUT, _STDERR, writer))
        os.open(os.devnull, os.O_RDONLY)  # takes the number of the jobs pipe, so that no output file gets it
        limits = Limits(memory_bytes=job["memory_bytes"], cpu_s=job["cpu_s"], required=job["required"])
        try:
            confine(Path(job["target_dir"]), limits, writes=not job.get("reads_only"))
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
