"""Checks what the daemon itself may do and has.

With processes: its user, capabilities, Yama, seccomp, namespaces, and its Python. With hostile data: whether its
decoders can be confined. And the disk that captures are stored on.
"""

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kineto_trace.base.quantities import format_size

from kinetod.attach.attach_types import NEWEST_TRIED, Finding, Status
from kinetod.attach.inspect import process_inspection
from kinetod.attach.inspect.process_inspection import PROC, OwnFacts
from kinetod.host_checks.check_protocol import CheckQuestion
from kinetod.sandbox.confinement import Support, support

# The first namespaces' numbers are the same on every Linux (include/linux/proc_ns.h).
_FIRST = {"pid": 4026531836, "user": 4026531837, "cgroup": 4026531835}
_COSTS = {
    "pid": (
        "the daemon sees only the processes of its own container",
        "run its container in the host's pid namespace (hostPID: true, or --pid=host)",
    ),
    "user": (
        "root in it has no rights outside, so the daemon cannot attach to other users' processes there",
        "run the daemon without a user namespace",
    ),
    "cgroup": (
        "the batch jobs and containers of processes cannot be determined",
        "run its container in the host's cgroup namespace (--cgroupns=host)",
    ),
}
_ADVICE = (
    "Landlock needs Linux 5.13 or later with `landlock` in lsm= on the kernel command line; a seccomp filter of the "
    "container or unit must allow landlock_* and seccomp. captures.decode_sandbox decides what kinetod does without "
    "them"
)
_SPARE = 4  # times what a capture needs to begin; less is worth a note
_FEW_FILES = 1000  # a capture takes a few dozens


def check_store(question: CheckQuestion) -> Iterator[Finding]:
    """One finding: whether captures can be stored. Blocks while the disk does not answer."""
    name, store = "store", Path(question.store)
    free = "free disk space, delete captures (`kinetoctl captures delete`), or shorten the retention ([store])"
    try:
        status = os.statvfs(store)
    except OSError as exc:
        yield Finding(name, Status.PROBLEM, f"{store}: {exc.strerror}", "check that its disk is mounted")
        return
    available, size = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    detail = f"{format_size(available)} of {format_size(size)} is free on the disk of {store}"
    if status.f_flag & os.ST_RDONLY or not os.access(store, os.W_OK | os.X_OK, effective_ids=True):
        yield Finding(name, Status.PROBLEM, f"{store} is not writable", "check its owner, mode and mount")
    elif available < question.needed_bytes:
        needed = format_size(question.needed_bytes)
        yield Finding(name, Status.PROBLEM, f"{detail}: captures are refused below {needed}", free)
    elif status.f_files and status.f_favail < _FEW_FILES:
        yield Finding(name, Status.PROBLEM, f"{detail}, but there is room for only {status.f_favail} more files", free)
    elif available < _SPARE * question.needed_bytes:
        needed = format_size(question.needed_bytes)
        yield Finding(name, Status.NOTE, f"{detail}; captures are refused below {needed}", free)
    else:
        yield Finding(name, Status.OK, detail)


def check_sandbox(_question: CheckQuestion) -> Iterable[Finding]:
    """Asks the kernel from a child of the daemon."""
    return sandbox_findings(support())


def sandbox_findings(found: Support) -> Iterator[Finding]:
    """The finding about the sandbox."""
    name = "sandbox"
    if found.missing:
        detail = f"decoders are not fully confined: {'; '.join(found.missing)}"
        yield Finding(name, Status.NOTE, detail, _ADVICE)
    else:
        yield Finding(name, Status.OK, f"decoders are confined by {found.present}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """This process. foreign: the namespaces of _FIRST that are not the host's; None: unknown."""

    own: OwnFacts
    foreign: tuple[str, ...] | None
    python: tuple[int, int, int] = sys.version_info[:3]
    has_gil: bool = True


def read(proc: Path = PROC) -> Rights:
    """Reads the rights of this process, which are the daemon's."""
    foreign: tuple[str, ...] | None = None
    with contextlib.suppress(OSError):
        links = {name: str((proc / "self/ns" / name).readlink()) for name in _FIRST}
        foreign = tuple(name for name, link in links.items() if link != f"{name}:[{_FIRST[name]}]")
    return Rights(
        own=process_inspection.read_own(proc), foreign=foreign, has_gil=getattr(sys, "_is_gil_enabled", lambda: True)()
    )


def check_rights(question: CheckQuestion) -> Iterable[Finding]:
    """The findings about the daemon's rights."""
    return rights_findings(read(), question)


def rights_findings(rights: Rights, question: CheckQuestion) -> Iterator[Finding]:
    """The findings, each before those that it explains."""
    yield _permissions(rights.own, question)
    yield _ptrace_scope(rights.own, question)
    yield _seccomp(rights.own, question)
    yield _namespaces(rights)
    yield _python(rights)


def _permissions(own: OwnFacts, question: CheckQuestion) -> Finding:
    name = "permissions"
    who = "root" if own.uid == 0 else f"uid {own.uid}"
    if not question.attaching:
        advice = "start kinetod without --no-attach, or start programs with the agent: `kinetoctl run -- <command>`"
        return Finding(name, Status.NOTE, f"runs as {who} and does not inject agents (attach.enabled is off)", advice)
    if question.helper:
        return Finding(name, Status.OK, f"runs as {who}; the attach helper attaches to processes for it")
    lacking = [each for each in ("CAP_SYS_PTRACE", "CAP_SYS_ADMIN") if each not in own.capabilities]
    if not own.capabilities & {"CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH"}:
        lacking.append("CAP_DAC_READ_SEARCH")
    if not lacking:
        return Finding(name, Status.OK, f"runs as {who} with all the capabilities that it needs")
    if own.uid != 0 and len(lacking) == 3:
        return Finding(name, Status.OK, f"runs as {who}; attaches only to that user's own processes")
    costs = {
        "CAP_SYS_PTRACE": "attach to other users' or protected processes",
        "CAP_SYS_ADMIN": "attach to processes with a seccomp filter, as in containers",
        "CAP_DAC_READ_SEARCH": "read other users' files in /proc",
    }
    detail = "; ".join(f"without {each} it cannot {costs[each]}" for each in lacking)
    return Finding(name, Status.NOTE, f"runs as {who}; {detail}", "give its container these capabilities")


def _ptrace_scope(own: OwnFacts, question: CheckQuestion) -> Finding:
    name, scope = "ptrace_scope", own.ptrace_scope
    exempt = question.helper or "CAP_SYS_PTRACE" in own.capabilities
    if scope is None:
        return Finding(name, Status.OK, "this kernel has no Yama")
    if scope >= 3:
        advice = "set kernel.yama.ptrace_scope to a lower value, which needs a reboot"
        return Finding(name, Status.PROBLEM, f"{scope}: an agent cannot be attached to any process", advice)
    if scope == 0 or exempt:
        return Finding(name, Status.OK, f"{scope}{', the daemon is exempt' if scope else ''}")
    advice = "run kinetod as a service (`kinetoctl host install`)"
    if scope == 1:
        advice += ", or set kernel.yama.ptrace_scope to 0"
    return Finding(name, Status.PROBLEM, f"{scope}: the daemon is not allowed to attach an agent to a process", advice)


def _seccomp(own: OwnFacts, question: CheckQuestion) -> Finding:
    name = "seccomp"
    if own.seccomp.mode == 0:
        return Finding(name, Status.OK, "the daemon has no filter")
    if question.helper:
        return Finding(
            name,
            Status.OK,
            "the daemon has a filter; the attach helper, which reads other processes' filters, has none",
        )
    detail = (
        "the daemon has a filter, so it cannot read those of other processes, and attaches only to processes that have "
        "the same or none"
    )
    advice = "run the daemon without one (seccomp=unconfined, a privileged container) and with CAP_SYS_ADMIN"
    return Finding(name, Status.NOTE, detail, advice)


def _namespaces(rights: Rights) -> Finding:
    name = "namespaces"
    if rights.foreign is None:
        return Finding(name, Status.UNKNOWN, "the daemon is not allowed to read its namespaces")
    if not rights.foreign:
        return Finding(name, Status.OK, "the host's")
    costs = [f"its own {each} namespace: {_COSTS[each][0]}" for each in rights.foreign]
    return Finding(name, Status.NOTE, "; ".join(costs), "; ".join(_COSTS[each][1] for each in rights.foreign))


def _python(rights: Rights) -> Finding:
    name, version = "python", ".".join(map(str, rights.python))
    if not rights.has_gil:
        return Finding(name, Status.NOTE, f"kinetod runs on a free-threaded Python {version}, which is untested")
    if rights.python[:2] > NEWEST_TRIED:
        return Finding(name, Status.NOTE, f"kinetod runs on Python {version}, newer than any it was tested with")
    return Finding(name, Status.OK, f"kinetod runs on Python {version}")
