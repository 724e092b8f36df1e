"""Confines this process to one folder, for good: files by Landlock, system calls by seccomp, sizes by limits.

Theory of operation
    Called between fork and the first byte of hostile data, while the process has one thread. The order matters: what
    later steps need (descriptors of rules, /proc/self/oom_score_adj) is no longer there afterwards.

    It keeps: its folder; the code of this Python and the system's libraries, to read; the pipes it was given; memory
    and processor time up to its limits. By stat it still learns whether a path exists. All else is gone: files of
    other captures, sockets of any kind, other processes, capabilities, new programs. Where the kernel lacks a part, the
    others still hold; `required` makes that an error instead.
"""

import contextlib
import functools
import os
import resource
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kineto_trace.model.target_info import raw_bytes

from kinetod.base.capabilities import drop_capabilities, prctl
from kinetod.sandbox import landlock, seccomp_filter

# For the libraries of a process that will be confined: none shall start a thread before, nor take address space that
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
_OUTPUT_FACTOR = 64  # and so many times its records: a Chrome event with a name of 2 KiB is made of 48 bytes
_OOM_FIRST = b"1000"  # if memory is short, the kernel ends this one and no other


class CannotConfine(Exception):
    """A part of the sandbox that is required cannot be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one decode. memory_bytes: private memory. required: fail if the kernel lacks a part of the sandbox."""

    memory_bytes: int
    cpu_s: int
    required: bool = False


def prepare() -> None:
    """Does in the warm process what is the same for all jobs: looks for the code, and makes the filter."""
    _code_folders()
    if seccomp_filter.available():
        seccomp_filter.prepare()


def confine(folder: Path, limits: Limits, readable: Iterable[Path] = ()) -> None:
    """Confines this process to this folder, and to reading these files, for good. Raises CannotConfine, OSError."""
    own = folder.resolve()
    _die_first_for_memory()
    _set_limits(own, limits)
    drop_capabilities()
    no_new_rights()
    version = landlock.abi()
    if version:
        reads = [(path, landlock.READ) for path in readable]
        landlock.restrict([*code(own), *reads, (own, landlock.OWN)], version)
    elif limits.required:
        raise CannotConfine('this kernel has no Landlock, and captures.decode_sandbox is "required"')
    if seccomp_filter.available():
        seccomp_filter.install()
    elif limits.required:
        raise CannotConfine('this kernel takes no seccomp filter, and captures.decode_sandbox is "required"')


def close_descriptors(keep: Collection[int]) -> None:
    """All but these: no pipe, socket or file of the parent stays open."""
    for descriptor in {int(entry.name) for entry in Path("/proc/self/fd").iterdir()} - set(keep):
        with contextlib.suppress(OSError):  # the one by which they were listed
            os.close(descriptor)


def code(own: Path) -> Iterator[tuple[Path, int]]:
    """Folders of code that may be loaded late, none of them secret; never the store, whatever sys.path says."""
    for folder in _code_folders():
        if not own.is_relative_to(folder):
            yield folder, landlock.READ
    for name in _CODE_FILES:
        yield Path(name), landlock.READ


@functools.cache
def _code_folders() -> tuple[Path, ...]:
    folders = {Path(entry).resolve() for entry in (*sys.path, *_CODE_FOLDERS) if entry}
    return tuple(sorted(folders | {Path(sys.base_prefix, "lib").resolve()}))


def _die_first_for_memory() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_bytes(_OOM_FIRST)


def most_output_bytes(target_dir: Path) -> int:
    """More than any trace of this target's records takes. Raises OSError."""
    return _CHEAP_BYTES + _OUTPUT_FACTOR * raw_bytes(target_dir)


def _set_limits(own: Path, limits: Limits) -> None:
    wanted = {
        resource.RLIMIT_CORE: 0,  # what is in it came from a target and belongs to its owner
        resource.RLIMIT_DATA: limits.memory_bytes,
        resource.RLIMIT_CPU: limits.cpu_s,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_FSIZE: most_output_bytes(own),
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for which, value in wanted.items():
        _, hard = resource.getrlimit(which)
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (least, least))


def no_new_rights() -> None:
    """Nor may others of the same user look into this process."""
    prctl(_PR_SET_DUMPABLE, 0)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
