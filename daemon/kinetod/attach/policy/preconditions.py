"""Whether a process may and can be attached to: one table of rules, for the attach and for `kinetoctl doctor`.

Theory of operation
    `examine` gathers plain values about the process and about us, without touching it. From them each rule derives OK,
    NOTE (works, with a restriction), PROBLEM (would fail, with the attach's code) or UNKNOWN (not readable). `check`
    raises the first PROBLEM; diagnosis.py shows all findings. Rules are ordered so that the first PROBLEM explains the
    others.

    Only `check` reads seccomp filters, since that takes a stop (seccomp_check.py); the rule is the same.

    The watchdog of the module faulthandler (dump_traceback_later) may crash a process that we enter. It is a native
    thread. After each period it walks the frames of all threads without the GIL, and reads memory that a thread which
    runs Python, begins or ends has just freed: a race in CPython that the program's own threads are exposed to as well.
    By estimate, one in 2,000 dumps during our threads' work crashes the process, so few dumps may coincide with it, and
    the first touch waits until none is due soon.

    That thread has all signals blocked and waits for a lock with a time limit. Where there is such a thread, the
    interpreter's data is searched for its arguments: a header, the text "Timeout (0:00:05)!", which has the period, and
    beside it the header's length. Another thread can be mistaken for it only after a watchdog that dumped once and was
    not cancelled.
"""

import contextlib
import re
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from kinetod.attach.attach_types import NEWEST_TRIED, AttachCode, AttachError, Deadline, Finding, Status
from kinetod.attach.inject.arch import InterruptedCall, this_machine
from kinetod.attach.inject.thread_policy import standing_call, thread_ids
from kinetod.attach.inspect import process_inspection, standstill
from kinetod.attach.inspect.process_inspection import (
    AARCH64,
    MAIN_THREAD_ADVICE,
    MAIN_THREAD_ENDED,
    X86_64,
    Access,
    InspectedProcess,
    OwnFacts,
    read_status,
)
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.policy import seccomp_check
from kinetod.attach.policy.seccomp_check import DEADLY, Filter, SeccompError, forbidden
from kinetod.processes.budgets import BUDGETS
from kinetod.processes.credentials import Credentials

HOST_INIT = 1
START_WITH_AGENT = "start it with the agent: `kinetoctl run -- <command>`"
_FREE_THREADED_OFFSET, _COOKIE = 16, b"xdebugpy"  # _Py_DebugOffsets, from 3.13 on
_NO_SHRINKING_BYTES = 832 << 20  # half of it: three sources with the usual limit of 128 MiB and their names
_D_STATE_PAUSE_S = 0.01
LOOK_S = 0.1  # how long doctor watches a process in state D
_OTHER_PYTHONS = {"pypy": "PyPy", "graalpy": "GraalPy", "jython": "Jython"}
_MAX_CALLS_NAMED = 4
# Programs that run a program's code translated: recognised by their own file, or by the library that they load into its
# process.
_VALGRIND = r"(?:\w+|exp-bbv)-(?:amd64|arm64|x86)-(?:linux|freebsd|solaris|darwin)"
_TRANSLATORS = (
    ("Valgrind", re.compile(_VALGRIND)),
    ("QEMU", re.compile(r"qemu-\w+(?:-static)?")),
    ("Box64", re.compile(r"box64\w*")),
    ("FEX", re.compile(r"FEX\w*")),
    ("Pin", re.compile(r"pinbin|libpin\w*\.so")),
    ("DynamoRIO", re.compile(r"libdynamorio\.so.*")),
)
SHORTEST_S = 1.0  # minimum period of a process that is entered: at most one dump coincides with the agent's start
QUIET_S = 0.5  # nothing is begun within this time before a dump
_AFTER_S = 0.02  # time after which a dump has been written
_LOOKS, _LOOK_S = 10, 0.001  # it may be dumping
_OURS = "kineto-"
_ALL_SIGNALS = (1 << 64) - 1 & ~sum(1 << number - 1 for number in (9, 19, 32, 33, 34))  # these cannot be blocked
_HEADER = re.compile(rb"Timeout \((\d+):(\d\d):(\d\d)(\.\d{6})?\)!\n")
_SIZE = re.compile(rb"[\x13-\x30]\0{7}")  # its size
_TEXT, _TIME = struct.Struct("<QQ"), struct.Struct("<qq")  # address and size; struct timespec
_MAX_DATA_BYTES = 32 << 20
_CLOCK_REALTIME = 0x100  # in the futex's operation


@dataclass(frozen=True, slots=True)
class TracebackWatchdog:
    """When the watchdog dumps."""

    period_s: float
    left_s: float  # until the next dump; 0: it is dumping, or unknown


def find(image: TargetImage) -> TracebackWatchdog | None:
    """Returns the watchdog that runs in the process; None if there is none."""
    tids = [tid for tid in thread_ids(image) if tid != image.pid and _may_be_one(image, tid)]
    period_s = _period_s(image) if tids else None
    if period_s is None:
        return None
    dumps = False
    for _look in range(_LOOKS):
        for tid in tids:
            call = standing_call(image, tid)
            dumps = dumps or _may_dump(call)
            if call is not None and _waits_for_a_lock(call) and call.arguments[3]:
                return TracebackWatchdog(period_s, _left_s(image, call.arguments[1], call.arguments[3]))
        time.sleep(_LOOK_S)
    return TracebackWatchdog(period_s, 0.0) if dumps else None


def await_quiet(image: TargetImage, deadline: Deadline) -> None:
    """Waits until no dump is due for QUIET_S."""
    while (found := find(image)) and found.left_s < QUIET_S and not deadline.passed:
        time.sleep(min(found.left_s + _AFTER_S, deadline.left_s))


def _may_be_one(image: TargetImage, tid: int) -> bool:
    status = read_status(image.proc / "task" / str(tid))
    blocked = int(status.get("SigBlk", "0"), 16)
    if blocked & _ALL_SIGNALS != _ALL_SIGNALS or status.get("Name", "").startswith(_OURS):
        return False
    call = standing_call(image, tid)
    if call is not None and _waits_for_a_lock(call):
        return bool(call.arguments[3])
    return _may_dump(call)


def _waits_for_a_lock(call: InterruptedCall) -> bool:
    """Whether it is a futex, or the rest of a wait that a stop of the process has interrupted."""
    return call.number in (this_machine().futex, this_machine().restart)


def _may_dump(call: InterruptedCall | None) -> bool:
    """Whether a thread may be dumping: it runs, or stands in a call that is no wait (a slow file's write)."""
    machine = this_machine()
    return call is None or call.number not in (*machine.parked_calls, *machine.waiting_calls)


def _period_s(image: TargetImage) -> float | None:
    for data in _data(image):
        for match in _SIZE.finditer(data):
            at = match.start() - 8
            if at < 0 or at % 8:
                continue
            with contextlib.suppress(OSError, AttachError):
                header, size = _TEXT.unpack_from(data, at)
                if found := _HEADER.fullmatch(image.memory.read(header, size)):
                    hours, minutes, seconds, rest = (float(part or 0) for part in found.groups())
                    return hours * 3600 + minutes * 60 + seconds + rest
    return None


def _data(image: TargetImage) -> Iterator[bytes]:
    """Yields the interpreter's own data, and the mapping without a file that follows its file (bss)."""
    end = -1
    for mapping in image.maps:
        follows = mapping.start == end and not mapping.path
        own = follows or (image.python is not None and mapping.path == image.python.path)
        if own and "w" in mapping.permissions:
            with contextlib.suppress(OSError, AttachError):
                yield image.memory.read(mapping.start, min(mapping.end - mapping.start, _MAX_DATA_BYTES))
        end = mapping.end if own else -1


def _left_s(image: TargetImage, operation: int, limit: int) -> float:
    """Returns the seconds until that point in time."""
    clock = time.CLOCK_REALTIME if operation & _CLOCK_REALTIME else time.CLOCK_MONOTONIC
    with contextlib.suppress(OSError, AttachError):
        seconds, ns = _TIME.unpack(image.memory.read(limit, _TIME.size))
        left: float = seconds + ns * 1e-9 - time.clock_gettime(clock)
        return max(0.0, left)
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The facts that the rules use. Without an image, `image_problem` may say why."""

    process: InspectedProcess
    own: OwnFacts
    image: TargetImage | None = None
    image_problem: AttachError | None = None
    filters: tuple[Filter, ...] | None = None  # None: not read
    moves: bool = False  # it was in state D at every look, but ran in between


Rule = Callable[[Subject], Finding]


def check(pid: int, image: TargetImage | None, patience_s: float = LOOK_S) -> None:
    """Raises AttachError with the first reason not to attach. Without an image, only rules that need none run.

    patience_s: how long to watch a process that is blocked in the kernel.
    """
    subject = replace(examine(pid, patience_s), image=image)
    _raise_first(subject, RULES)
    if image is None:
        return
    _raise_first(subject, IMAGE_RULES)
    if _filters_matter(subject):
        filters = seccomp_check.read_filters(pid, subject.process.seccomp, subject.own.machine, approved=image.approved)
        subject = replace(subject, filters=tuple(filters))
    _raise_first(subject, (seccomp,))


def suitable_image(pid: int, patience_s: float = LOOK_S, approved: Credentials | None = None) -> TargetImage:
    """Returns the image of a process that can be attached to. approved: see TargetImage. Raises AttachError."""
    try:
        image = TargetImage(pid, approved=approved)
    except AttachError:
        check(pid, None)  # may give a better reason
        raise
    check(pid, image, patience_s)
    return image


def examine(pid: int, patience_s: float = LOOK_S) -> Subject:
    """Gathers the facts. Raises AttachError if there is no such process. patience_s: how long to watch state D."""
    deadline = Deadline(patience_s)
    try:
        process = first = process_inspection.read_process(pid)
        while process.state == "D" and not process.frozen_by and process.switches == first.switches:
            if deadline.passed:
                break
            time.sleep(_D_STATE_PAUSE_S)
            process = process_inspection.read_process(pid)
    except ProcessLookupError as exc:
        raise AttachError(AttachCode.GONE, f"there is no process {pid} on this host (it may have ended)") from exc
    return Subject(process=process, own=process_inspection.read_own(), moves=process.switches != first.switches)


def _raise_first(subject: Subject, rules: tuple[Rule, ...]) -> None:
    for rule in rules:
        finding = rule(subject)
        if finding.status is Status.PROBLEM:
            text = f"process {subject.process.pid} ({subject.process.name}) cannot be attached to: {finding.detail}"
            raise AttachError(finding.code, f"{text}; {finding.advice}" if finding.advice else text)


def _problem(name: str, code: AttachCode, detail: str, advice: str = "") -> Finding:
    return Finding(name, Status.PROBLEM, detail, advice, code)


def process(subject: Subject) -> Finding:
    """Whether it is a live user-space process that can run code."""
    found, own = subject.process, subject.own
    unsuitable = AttachCode.UNSUITABLE
    if found.process_pid != found.pid:
        detail = f"{found.pid} is the id of a thread of process {found.process_pid}"
        return _problem("process", unsuitable, detail, f"use process {found.process_pid} instead")
    if found.kernel_thread:
        return _problem("process", unsuitable, "it is a kernel thread", "choose a user process")
    if found.pid == HOST_INIT and own.host_pid_namespace:
        return _problem("process", unsuitable, "it is the host's init process", "choose another process")
    if found.pid in own.pids:
        detail = "it is the daemon itself or one of its processes"
        return _problem("process", unsuitable, detail, "choose another process")
    if found.state in "ZX" or found.exiting:
        if found.state == "Z" and found.thread_count > 1:
            return _problem("process", unsuitable, MAIN_THREAD_ENDED, MAIN_THREAD_ADVICE)
        detail = "it has ended, but its parent has not reaped it (zombie)" if found.state == "Z" else "it is exiting"
        return _problem("process", unsuitable, detail, "`kinetoctl ps --all` lists running processes")
    if found.frozen_by:
        return _problem("process", unsuitable, *standstill.frozen(found.frozen_by))
    if found.state == "D" and not subject.moves:
        return _problem("process", unsuitable, standstill.D_STATE, standstill.D_STATE_ADVICE)
    if found.state == "T":
        return _problem("process", unsuitable, *standstill.stopped(found.pid))
    return Finding("process", Status.OK, f"{found.name}, state {found.state}")


def tracer(subject: Subject) -> Finding:
    """A process has one tracer at most."""
    found = subject.process
    if not found.tracer_pid:
        return Finding("tracer", Status.OK, "none")
    name = f"{found.tracer_name or 'process'} (pid {found.tracer_pid})"
    return _problem("tracer", AttachCode.TRACED, f"it is being traced by {name}", "end that tool or let it detach")


def executable(subject: Subject) -> Finding:
    """Whether the program is of a kind that can be entered."""
    found = subject.process.executable
    if found is None or not found.bits:
        return Finding("executable", Status.UNKNOWN, "the daemon is not allowed to read its file")
    detail = f"{found.path}{' (deleted)' if found.deleted else ''}, {found.bits}-bit, {found.machine}"
    unsupported = AttachCode.UNSUPPORTED
    if found.bits != 64:
        return _problem("executable", unsupported, f"{found.path} is a 32-bit program", "run a 64-bit build")
    if found.machine not in (X86_64, AARCH64) or found.machine != subject.own.machine:
        return _problem("executable", unsupported, f"{found.path} is built for {found.machine}", START_WITH_AGENT)
    name = PurePosixPath(found.path).name.lower()
    translator = _translator(subject)
    if translator:
        what = f"it runs under {translator}, and code cannot be injected into translated programs"
        return _problem("executable", unsupported, what, f"run it without {translator}, or {START_WITH_AGENT}")
    for prefix, title in _OTHER_PYTHONS.items():
        if name.startswith(prefix):
            advice = "run the program with CPython"
            return _problem("executable", unsupported, f"it runs {title}; only CPython is supported", advice)
    if found.frozen:
        advice = "run the program from its sources, or call kineto_agent.start() in it"
        what = f"{found.path} was packed with {found.frozen}: its standard library is incomplete"
        return _problem("executable", unsupported, what, advice)
    if subject.process.shadow_stack:
        advice = "start it without one (GLIBC_TUNABLES=glibc.cpu.x86_shstk=off)"
        return _problem("executable", unsupported, f"{found.path} runs with a user shadow stack", advice)
    return Finding("executable", Status.OK, detail)


def _translator(subject: Subject) -> str:
    """The program that translates the target's code: stopped threads are then in the translator, not the target."""
    found = subject.process.executable
    paths = [found.path if found else "", *(subject.image.modules if subject.image else ())]
    names = [PurePosixPath(path).name for path in paths]
    return next((title for title, pattern in _TRANSLATORS if any(map(pattern.fullmatch, names))), "")


def proc_files(subject: Subject) -> Finding:
    """The agent finds its library, threads and mappings there."""
    if not subject.process.sees_proc:
        detail = "its root directory (chroot) has no /proc, which the agent needs to load its library"
        advice = "mount a proc file system at /proc there"
        return _problem("/proc", AttachCode.UNSUITABLE, detail, advice)
    return Finding("/proc", Status.OK, "mounted in its root directory")


def permission(subject: Subject) -> Finding:
    """Whether the kernel permits tracing. The rules owner, ptrace_scope and capabilities explain it."""
    answer = subject.process.access
    if answer is Access.ALLOWED:
        return Finding("permission", Status.OK, "the kernel lets the daemon trace it")
    if answer is Access.UNKNOWN:
        detail = "could not be checked: the process has no memory, or this kernel lacks the system call"
        return Finding("permission", Status.UNKNOWN, detail)
    reasons = [rule(subject) for rule in (owner, ptrace_scope)]
    for reason in reasons:
        if reason.status is Status.PROBLEM:
            return replace(reason, name="permission")
    detail = "the kernel does not let the daemon trace it"
    if "CAP_SYS_PTRACE" in subject.own.capabilities:
        advice = (
            "is a security module (SELinux deny_ptrace, AppArmor) or a user namespace blocking it? See the kernel's log"
        )
    else:
        advice = _run_with("CAP_SYS_PTRACE")
    return _problem("permission", AttachCode.NOT_PERMITTED, detail, advice)


def owner(subject: Subject) -> Finding:
    """Same user and dumpable, or CAP_SYS_PTRACE."""
    found, own = subject.process, subject.own
    theirs = ", ".join(str(uid) for uid in dict.fromkeys(found.uids[:3]))
    refused = found.access is Access.REFUSED and "CAP_SYS_PTRACE" not in own.capabilities
    if set(found.uids[:3]) != {own.uid}:
        detail = f"it runs as uid {theirs}, the daemon as uid {own.uid}"
        if refused:
            advice = f"use a daemon that runs as uid {found.uids[1]}, or the system's daemon, which runs as root"
            return _problem("owner", AttachCode.NOT_PERMITTED, detail, advice)
        return Finding("owner", Status.OK, detail)
    if found.dumpable is False and refused:
        detail = f"it runs as uid {theirs} like the daemon, but is not dumpable (it changed its ids or called prctl)"
        return _problem("owner", AttachCode.NOT_PERMITTED, detail, _run_with("CAP_SYS_PTRACE"))
    return Finding("owner", Status.OK, f"it runs as uid {theirs}, like the daemon")


def ptrace_scope(subject: Subject) -> Finding:
    """Whether Yama's ptrace_scope allows tracing."""
    scope, allowed = subject.own.ptrace_scope, subject.process.access is Access.ALLOWED
    privileged = "CAP_SYS_PTRACE" in subject.own.capabilities
    name = "ptrace_scope"
    if scope is None:
        return Finding(name, Status.OK, "no Yama in this kernel")
    if scope >= 3:
        advice = "set kernel.yama.ptrace_scope to a lower value, which requires a reboot"
        return _problem(name, AttachCode.NOT_PERMITTED, f"ptrace_scope is {scope}: no process can be traced", advice)
    if scope == 0 or privileged or allowed:
        return Finding(name, Status.OK, f"{scope}{', the daemon is exempt' if scope and privileged else ''}")
    who = "one of its ancestors" if scope == 1 else "an administrator"
    advice = f"{_run_with('CAP_SYS_PTRACE')}{', or set kernel.yama.ptrace_scope to 0' if scope == 1 else ''}"
    return _problem(name, AttachCode.NOT_PERMITTED, f"ptrace_scope is {scope}: only {who} can trace it", advice)


def capabilities(subject: Subject) -> Finding:
    """The capabilities that the daemon lacks, and what each costs."""
    name, own = "capabilities", subject.own.capabilities
    if subject.process.access is Access.ALLOWED and not subject.process.files_visible:
        detail = "the daemon is allowed to trace the process but not to read its open files, which an attach needs"
        return _problem(name, AttachCode.NOT_PERMITTED, detail, _run_with("CAP_DAC_READ_SEARCH"))
    costs = {
        "CAP_SYS_PTRACE": "other users' or protected processes",
        "CAP_SYS_ADMIN": "processes with a seccomp filter",
    }
    lacking = [f"without {each}: cannot attach to {cost}" for each, cost in costs.items() if each not in own]
    if not own & {"CAP_DAC_OVERRIDE", "CAP_DAC_READ_SEARCH"}:
        lacking.append("without CAP_DAC_READ_SEARCH: cannot attach to other users' processes")
    if not lacking:
        return Finding(name, Status.OK, "the daemon has all it needs")
    return Finding(name, Status.OK, "; ".join(lacking))


def budget(name: str) -> Rule:
    """Makes a rule: do the limits of that check leave what an attach takes? See the table in budgets.py."""

    def rule(subject: Subject) -> Finding:
        found = [each for each in subject.process.budgets if each.budget.check == name]
        short = next((each for each in found if each.short), None)
        if short is not None:
            return _problem(name, AttachCode.LIMIT, short.text(), short.room.advice)
        if not found and name == "threads":  # counted only near a limit
            return Finding(name, Status.OK, "not close to any limit on threads")
        if not found:
            return Finding(name, Status.UNKNOWN, "the daemon is not allowed to read its limits")
        detail = "; ".join(str(each.room) for each in found)
        if any(each.budget.buffers and each.room.left < _NO_SHRINKING_BYTES for each in found):
            return Finding(name, Status.NOTE, detail, "a capture may have to shrink its buffers to fit")
        return Finding(name, Status.OK, detail)

    return rule


def _run_with(capability: str) -> str:
    return f"run kinetod as root, or with {capability}"


def interpreter(subject: Subject) -> Finding:
    """CPython with exported symbols, or a CUDA program without Python."""
    name, unsupported = "interpreter", AttachCode.UNSUPPORTED
    image = subject.image
    if subject.image_problem is not None:
        return _problem(name, subject.image_problem.code, subject.image_problem.reason)
    if image is None:
        return Finding(name, Status.UNKNOWN, "the daemon is not allowed to read its memory")
    if image.python is None:
        if uses_cuda(image):
            return Finding(name, Status.NOTE, "no Python interpreter: GPU activities only, no Python stacks")
        detail = "it has neither a Python interpreter (CPython 3.9 or later) nor CUDA"
        advice = "choose the process that does the work; `kinetoctl ps --all` lists them"
        return _problem(name, unsupported, detail, advice)
    version = ".".join(map(str, image.python.version if image.python.version[2] else image.python.version[:2]))
    kind = "static" if image.python.path == image.exe else "shared"
    detail = f"CPython {version} in {image.python.path} ({kind}), all symbols found"
    if _is_free_threaded(image):
        advice = f"run it with the standard build of Python {version}, or {START_WITH_AGENT}"
        return _problem(name, unsupported, f"{image.python.path} is a free-threaded build of Python", advice)
    if image.python.version[:2] > NEWEST_TRIED:
        return Finding(name, Status.NOTE, detail, "newer than any version that this kinetod was tested with")
    return Finding(name, Status.OK, detail)


def faulthandler(subject: Subject) -> Finding:
    """Whether tracebacks of all threads are dumped often: one in some thousands of such dumps ends the process."""
    name, image = "faulthandler", subject.image
    if image is None:
        return Finding(name, Status.UNKNOWN, "the daemon is not allowed to read its memory")
    found = find(image)
    if found is None:
        return Finding(name, Status.OK, "no watchdog (dump_traceback_later)")
    detail = f"dump_traceback_later() is active with a period of {found.period_s:g} s"
    if found.period_s < SHORTEST_S:
        detail += ", and a dump while the agent is starting may crash the process (SIGSEGV)"
        advice = f"raise that period to at least {SHORTEST_S:g} s, or call cancel_dump_traceback_later()"
        return _problem(name, AttachCode.UNSUITABLE, detail, advice)
    return Finding(name, Status.NOTE, f"{detail}; attaching waits until the next dump is at least half a second away")


def uses_cuda(image: TargetImage) -> bool:
    """Whether the CUDA driver is loaded."""
    return any(PurePosixPath(path).name.startswith("libcuda.so") for path in image.modules)


def _is_free_threaded(image: TargetImage) -> bool:
    runtime = image.python.symbol("_PyRuntime") if image.python else None
    if runtime is None:
        return False
    try:
        head = image.memory.read(runtime[0], _FREE_THREADED_OFFSET + 8)
    except OSError:
        return False
    return head.startswith(_COOKIE) and any(head[_FREE_THREADED_OFFSET:])


def _filters_matter(subject: Subject) -> bool:
    return subject.process.seccomp.mode == process_inspection.SECCOMP_FILTER and not _same_filters_as_ours(subject)


def _same_filters_as_ours(subject: Subject) -> bool:
    """Whether the target, we and our common init have equally many filters: then they are init's, since none is ever
    removed.
    """
    own, theirs = subject.own, subject.process
    same_namespace = theirs.foreign_namespaces is not None and "pid" not in theirs.foreign_namespaces
    return same_namespace and theirs.seccomp.filters > 0 and theirs.seccomp == own.seccomp == own.init_seccomp


def seccomp(subject: Subject) -> Finding:
    """Whether its filters allow the agent's calls: a filter that kills would end the process for such a call."""
    found, own, name = subject.process.seccomp, subject.own, "seccomp"
    refuse = AttachCode.SECCOMP
    if found.mode == 0:
        return Finding(name, Status.OK, "no filter")
    if found.mode == process_inspection.SECCOMP_STRICT:
        return _problem(name, refuse, "it is in strict seccomp mode and can only read, write and exit")
    count = f"{found.filters} filter{'s' if found.filters != 1 else ''}" if found.filters else "filters"
    if _same_filters_as_ours(subject):
        return Finding(name, Status.OK, f"{count}, the same as the daemon's own")
    if subject.filters is None:
        if "CAP_SYS_ADMIN" in own.capabilities and own.seccomp.mode == 0:
            detail = (
                f"{count}; an attach reads every filter first (stopping the process for about 0.1 ms) and is refused "
                "if one forbids it"
            )
            return Finding(name, Status.NOTE, detail)
        detail = (
            f"{count} that the daemon is not allowed to read; an attach is refused, since it could kill the process"
        )
        advice = "run kinetod with CAP_SYS_ADMIN and without a seccomp filter of its own (a privileged container)"
        return _problem(name, refuse, detail, f"{advice}, or {START_WITH_AGENT}")
    if any(each.looks_at_the_caller for each in subject.filters):
        detail = f"{count}, one of which checks where in the program a call comes from"
        return _problem(name, refuse, detail, START_WITH_AGENT)
    try:
        calls = forbidden(subject.filters, own.machine)
    except SeccompError as exc:
        return _problem(name, refuse, f"{count}, one of which cannot be evaluated: {exc}", START_WITH_AGENT)
    if not calls:
        return Finding(name, Status.OK, f"{count}, allowing everything that the agent does")
    deadly = any(call.action.kind in DEADLY for call in calls)
    named = ", ".join(map(str, calls[:_MAX_CALLS_NAMED])) + (" and more" if len(calls) > _MAX_CALLS_NAMED else "")
    detail = f"{count}, blocking calls that the agent makes{' by killing the process' if deadly else ''}: {named}"
    return _problem(name, refuse, detail, "allow these system calls in its sandbox or container profile")


LIMIT_RULES: tuple[Rule, ...] = tuple(budget(name) for name in dict.fromkeys(each.check for each in BUDGETS))
# Ordered so that a finding explains later ones. The second part needs the image.
RULES: tuple[Rule, ...] = (process, tracer, executable, permission, capabilities, proc_files, *LIMIT_RULES)
IMAGE_RULES: tuple[Rule, ...] = (interpreter, faulthandler)
