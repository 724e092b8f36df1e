"""Finds what prevents tracing a process, and what a trace would contain: `kinetoctl doctor`.

Theory of operation
    All rules of preconditions.py, and some more that an attach does not need. Nothing is stopped and nothing is
    written; the process's memory is read through /proc/PID/mem.

    `python -m kinetod.attach_helper.diagnosis` answers one question (JSON on standard input) on standard output. The
    daemon inspects processes only this way: files that a hostile process maps or opens can block a reader, and this
    process can then be killed (diagnosis_runner.py).
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from kineto_agent.sources.cupti import libcupti
from kineto_agent.sources.cupti.known_versions import RELEASES
from kineto_agent.system import env

from kinetod import profilers as profilers
from kinetod.attach.attach_types import AttachCode, AttachError, Finding, Status
from kinetod.attach.inspect import cupti_search, device_graph_code, process_inspection
from kinetod.attach.inspect.process_inspection import PROC, MappedFacts
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.policy.preconditions import (
    LIMIT_RULES,
    Subject,
    capabilities,
    examine,
    executable,
    faulthandler,
    interpreter,
    owner,
    permission,
    proc_files,
    process,
    ptrace_scope,
    seccomp,
    tracer,
    uses_cuda,
)
from kinetod.base.safe_text import clean
from kinetod.kineto_ipc.door_findings import KinetoStart
from kinetod.kineto_ipc.network_namespaces import SOCKET_DIR, USE_DAEMON

AGENT, PENDING_CALL, COLLECTOR = "agent", "pending-call", "collector"
_READY, _BUSY, _INCOMPATIBLE = "READY", "BUSY", "INCOMPATIBLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownAgent:
    """The process's agent, as known to the daemon. state: READY, BUSY, INCOMPATIBLE; empty if it has none."""

    state: str = ""
    version: str = ""
    attached: bool = False
    capture_id: str = ""
    attaching: bool = True  # whether the daemon attaches at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Result for `kinetoctl doctor`. method: how a capture would enter the process; empty if it cannot. kineto: None if
    it was started without KINETO_USE_DAEMON, or its environment cannot be read.
    """

    method: str
    findings: tuple[Finding, ...] = field(default_factory=tuple)
    kineto: KinetoStart | None = None


def diagnose(pid: int, agent: KnownAgent | None = None) -> Diagnosis:
    """Inspects a process. Raises AttachError (GONE) if it does not exist."""
    agent = agent or KnownAgent()
    subject = _with_image(examine(pid))
    mapped = process_inspection.read_mapped(pid)
    who = (process, owner, permission, ptrace_scope, capabilities, tracer)
    findings = [rule(subject) for rule in (*who, _namespaces, proc_files, *LIMIT_RULES, executable, interpreter)]
    findings += [faulthandler(subject), seccomp(subject), _libc(mapped), _agent(agent)]
    usable = agent.state in (_READY, _BUSY)
    if usable:
        findings = [_not_needed(finding) for finding in findings]
    blocked = any(finding.status is Status.PROBLEM for finding in findings)
    method = _method(subject, usable=usable, blocked=blocked)
    findings += [
        method,
        _cuda(mapped),
        _cupti(subject, mapped),
        _cuda_graphs(subject, mapped),
        _profilers(mapped),
        _torch(mapped),
    ]
    chosen = "" if method.status is Status.PROBLEM else method.detail.partition(":")[0]
    return Diagnosis(method=chosen, findings=tuple(findings), kineto=kineto_start(pid))


def _with_image(subject: Subject) -> Subject:
    """Adds the image, if the process has one that we may read."""
    if any(rule(subject).status is Status.PROBLEM for rule in (executable, permission)):
        return subject
    if subject.process.kernel_thread or subject.process.state in "ZX":
        return subject
    try:
        return replace(subject, image=TargetImage(subject.process.pid))
    except AttachError as exc:
        return replace(subject, image_problem=exc)


def _not_needed(finding: Finding) -> Finding:
    """An agent is present: obstacles to attaching do not matter, but a process that is stopped does."""
    if finding.status is not Status.PROBLEM or finding.name == "process":
        return finding
    return replace(finding, status=Status.NOTE, advice="not needed: the process has an agent")


def _namespaces(subject: Subject) -> Finding:
    found = subject.process
    if found.foreign_namespaces is None:
        return Finding("namespaces", Status.UNKNOWN, "the daemon is not allowed to read them")
    if not found.foreign_namespaces:
        return Finding("namespaces", Status.OK, "the daemon's own")
    detail = f"its own {', '.join(found.foreign_namespaces)}"
    if len(found.namespace_pids) > 1:
        detail += f"; its pid inside is {found.namespace_pids[-1]}"
    return Finding("namespaces", Status.OK, detail)


def _libc(mapped: MappedFacts | None) -> Finding:
    if mapped is None:
        return Finding("libc", Status.UNKNOWN, "the daemon is not allowed to read its memory mappings")
    if mapped.libc == "glibc":
        return Finding("libc", Status.OK, "glibc")
    if mapped.libc == "musl":
        return Finding("libc", Status.NOTE, "musl: this kinetod was tested with glibc only")
    return Finding("libc", Status.NOTE, "no shared C library: is it linked statically?")


def _agent(agent: KnownAgent) -> Finding:
    name = "agent"
    origin = "injected by the daemon" if agent.attached else "started by the process itself"
    if agent.state == _READY:
        return Finding(name, Status.OK, f"kineto-agent {agent.version}, {origin}")
    if agent.state == _BUSY:
        detail = f"kineto-agent {agent.version}, {origin}, busy with capture {agent.capture_id}"
        return Finding(name, Status.NOTE, detail, "wait until that capture ends, or cancel it")
    if agent.state == _INCOMPATIBLE:
        detail = "its agent and this daemon speak different protocol versions"
        advice = "install the same version of kineto-agent and kinetod and restart the older one"
        return Finding(name, Status.PROBLEM, detail, advice, AttachCode.FAILED)
    if not agent.attaching:
        advice = "start kinetod without --no-attach, or the process with the agent: `kinetoctl run -- <command>`"
        return Finding(name, Status.PROBLEM, "none, and this daemon does not inject agents", advice, AttachCode.FAILED)
    return Finding(name, Status.OK, "none yet: a capture will inject it")


def _method(subject: Subject, *, usable: bool, blocked: bool) -> Finding:
    image = subject.image
    if blocked or (image is None and not usable):
        return Finding("method", Status.PROBLEM, "none: a capture is not possible", "see the problems above")
    if usable:
        return Finding("method", Status.OK, f"{AGENT}: the process already has one")
    assert image is not None
    if image.python is None:
        assert uses_cuda(image)  # otherwise the rule `interpreter` has found a problem
        return Finding("method", Status.OK, f"{COLLECTOR}: GPU activities only, from a thread of its own")
    detail = f"{PENDING_CALL}: one thread is stopped for about 0.3 ms, if possible not the main thread"
    if _main_thread_waits(subject.process.pid):
        detail += "; the main thread is waiting in a system call: unless it returns soon, native-thread is tried next"
    return Finding("method", Status.OK, detail)


def _main_thread_waits(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return not (PROC / str(pid) / "task" / str(pid) / "syscall").read_text().startswith("running")
    return False


def _cuda(mapped: MappedFacts | None) -> Finding:
    if mapped is None:
        return Finding("cuda", Status.UNKNOWN, "the daemon is not allowed to read its memory mappings")
    parts = [*mapped.cuda, *(f"{path} open" for path in mapped.gpu_files if path[-1].isdigit())]
    if mapped.cuda:
        return Finding("cuda", Status.OK, ", ".join(parts))
    return Finding("cuda", Status.NOTE, "not loaded: no GPU activities for now" + (f"; {parts[0]}" if parts else ""))


def _cupti(subject: Subject, mapped: MappedFacts | None) -> Finding:
    name, image = "cupti", subject.image
    if mapped is None or image is None:
        return Finding(name, Status.UNKNOWN, "the daemon is not allowed to read its memory mappings")
    if mapped.cupti:
        function = image.symbol_in(("libcupti.so",), cupti_search.FUNCTION)
        version = cupti_search.version_in_memory(image.memory, function) if function else None
        return _cupti_finding(f"{mapped.cupti}, loaded", version)
    if not mapped.cuda:
        return Finding(name, Status.NOTE, "not loaded, and neither is CUDA")
    found = _installed_cupti(subject.process.pid, mapped)
    if found is None:
        advice = f"install CUPTI for its CUDA version, or start the process with {env.CUPTI_LIBRARY} set"
        detail = "not loaded, and not found in the usual places; the agent also searches Python's own paths"
        return Finding(name, Status.UNKNOWN, detail, advice)
    path, file = found
    return _cupti_finding(f"{path}, not loaded yet", cupti_search.version_in_file(file))


def _cupti_finding(where: str, version: int | None) -> Finding:
    if version is None:
        return Finding("cupti", Status.UNKNOWN, f"{where}; its version cannot be determined from outside")
    if version in RELEASES:
        return Finding("cupti", Status.OK, f"{where}, from CUDA {RELEASES[version]} (version {version})")
    advice = "GPU activities need a newer kinetod that supports this version"
    return Finding("cupti", Status.NOTE, f"{where}, version {version}, which this kinetod does not support", advice)


def _cuda_graphs(subject: Subject, mapped: MappedFacts | None) -> Finding:
    """Whether the process has graphs is not visible from outside; its device code and an earlier capture are."""
    name = "cuda_graphs"
    if mapped is None:
        return Finding(name, Status.UNKNOWN, "the daemon is not allowed to read its memory mappings")
    if not mapped.cuda:
        return Finding(name, Status.OK, "none without CUDA")
    if file := device_graph_code.find(subject.process.pid):
        detail = f"device code in {file} launches graphs; with CUPTI in the process, these could crash it"
        return Finding(name, Status.NOTE, detail, "a capture does not use CUPTI: no GPU activities")
    if mapped.cupti_stays:
        detail = (
            "a capture recorded graph launches or could not rule them out: CUPTI stays in the process until it ends"
        )
        return Finding(
            name, Status.NOTE, detail, "graph launches already take slightly longer; more captures do not add to that"
        )
    detail = (
        "if it launches graphs during a capture, CUPTI stays attached afterwards, since detaching would end the program"
    )
    return Finding(name, Status.OK, detail)


def _installed_cupti(pid: int, mapped: MappedFacts) -> tuple[str, Path] | None:
    """Returns the path as the process sees it, and the one we can open."""
    root = PROC / str(pid) / "root"
    environ = process_inspection.environment(pid) or {}
    if explicit := environ.get(env.CUPTI_LIBRARY):
        return explicit, root / explicit.lstrip("/")
    packages = []
    if "/torch/" in mapped.torch:  # NVIDIA's wheels are next to it
        packages.append(mapped.torch.partition("/torch/")[0])
    found = libcupti.installed(packages, environ, str(root))
    return (found, root / found.lstrip("/")) if found else None


def _profilers(mapped: MappedFacts | None) -> Finding:
    if mapped is None:
        return Finding(profilers.NAME, Status.UNKNOWN, "the daemon is not allowed to read its memory mappings")
    return profilers.library_finding(mapped.profilers)


def _torch(mapped: MappedFacts | None) -> Finding:
    if mapped is None:
        return Finding("torch", Status.UNKNOWN, "the daemon is not allowed to read its memory mappings")
    if not mapped.torch:
        return Finding("torch", Status.OK, "not loaded")
    detail = f"loaded ({mapped.torch}); whether its profiler is recording cannot be seen from outside"
    return Finding("torch", Status.NOTE, detail, "while torch.profiler is recording, a capture contains no CUDA calls")


def kineto_start(pid: int, proc: Path = PROC) -> KinetoStart | None:
    """How its libkineto looks for a daemon; None if it does not, or if that cannot be read."""
    environ = process_inspection.environment(pid, proc) or {}
    if USE_DAEMON not in environ:
        return None
    namespace = 0
    with contextlib.suppress(OSError):
        namespace = (proc / str(pid) / "ns/net").stat().st_ino
    return KinetoStart(folder=clean(environ.get(SOCKET_DIR, ""), 200), net_namespace=namespace)


def encode(diagnosis: Diagnosis) -> bytes:
    """Encodes a diagnosis as one JSON object."""
    return json.dumps(asdict(diagnosis)).encode()


def decode(data: bytes | bytearray) -> Diagnosis:
    """Decodes the result of `encode`. Raises ValueError."""
    try:
        fields = json.loads(data)
        findings = tuple(
            Finding(each["name"], Status(each["status"]), each["detail"], each["advice"], AttachCode(each["code"]))
            for each in fields["findings"]
        )
        kineto = KinetoStart(**fields["kineto"]) if fields["kineto"] is not None else None
        return Diagnosis(method=fields["method"], findings=findings, kineto=kineto)
    except (KeyError, TypeError, RecursionError) as exc:
        raise ValueError(f"not a diagnosis: {exc!r}") from exc


def answer(question: bytes, look: Callable[[int, KnownAgent], Diagnosis] = diagnose) -> bytes:
    """question: {"pid": …, "agent": {…}}. Raises ValueError, AttachError."""
    fields = json.loads(question)
    return encode(look(int(fields["pid"]), KnownAgent(**fields["agent"])))


def main() -> int:
    """Answers one question from standard input on standard output; 3 if there is no such process."""
    with contextlib.suppress(OSError):
        os.nice(5)  # the inspected program has priority
    try:
        sys.stdout.buffer.write(answer(sys.stdin.buffer.read()))
    except AttachError as exc:
        sys.stderr.write(exc.reason)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
