"""The upload worker: a process that talks to object stores for the daemon, several jobs at a time.

Theory of operation
    Libraries of object stores are large, have threads and event loops of their own, and may hang. So they run here: the
    daemon starts this process on demand, ends it when idle, and kills it when a job makes no progress. It never
    outlives its daemon; a lock on the store makes sure that the worker of a daemon that was killed is gone before the
    next one begins.

    A store may be hostile, so the process is confined (`confine`) before it receives anything.

    Each input line is one job, which runs in a thread. Jobs are `upload`, `read` (one block), `verify` and `remove`,
    and `cancel` for another job. See `worker_protocol` for the form.
"""

import contextlib
import fcntl
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from kineto_trace.store.object_stores import scheme_of, store_error
from kineto_trace.store.upload_manifest import Manifest

from kinetod.base.libc import drop_capabilities
from kinetod.base.safe_text import redacted
from kinetod.sandbox import landlock, seccomp_filter
from kinetod.sandbox.confinement import code, die_with_parent, no_new_rights
from kinetod.uploads.upload_job import RemoteCapture, Throttle, UploadJob, open_store, sink_for, upload_capture
from kinetod.uploads.worker_protocol import Cancelled, LocalDamage, RemoteDamage, UploadError, WorkerOptions, secrets_of

MAX_JOBS = 64
PROGRESS_PERIOD_S = 0.2
_MANIFESTS = 16
_Job = Mapping[str, Any]
_NONE = (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE)
_SYSTEM = (
    "/etc/resolv.conf", "/etc/hosts", "/etc/host.conf", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/services",
    "/etc/protocols", "/etc/passwd", "/etc/localtime", "/etc/mime.types", "/etc/ssl", "/etc/pki",
    "/etc/crypto-policies", "/etc/ca-certificates", "/usr/share", "/usr/local/share", "/proc/cpuinfo",
    "/proc/meminfo", "/proc/sys", "/sys/devices/system/cpu", "/run/systemd/resolve", "/bin", "/usr/bin", "/lib",
    "/lib64", "/usr/lib",
)  # fmt: skip
_HOME = (".aws", ".azure", ".config/gcloud", ".boto")  # where libraries of stores look for and keep tokens
_CERTIFICATES = ("SSL_CERT_DIR", "AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE")  # variables that may name folders
_DAEMONS_OWN = "KINETOD_"  # its settings name its keys


class Worker:
    """Answers jobs on a stream."""

    def __init__(self, output: BinaryIO, options: WorkerOptions) -> None:
        self._output = output
        self._options = options
        self._writing = threading.Lock()
        self._throttle = Throttle(options.bytes_per_second)
        self._cancelled: set[int] = set()
        self._secrets = secrets_of()
        self._manifests: dict[tuple[str, str], Manifest] = {}

    def handle(self, job: _Job) -> None:
        """Does one job and answers it. Raises only if the output is closed."""
        number = int(job["id"])
        try:
            answer, data = self._do(job, number)
            self._say({"id": number, "ok": True, **answer}, data)
        except Exception as exc:  # noqa: BLE001  # whatever a library raises is the job's answer
            self._say({"id": number, "ok": False, **self._problem(exc)})
        finally:
            self._cancelled.discard(number)

    def cancel(self, number: int) -> None:
        """Cancels a job at its next step."""
        self._cancelled.add(number)

    def _do(self, job: _Job, number: int) -> tuple[dict[str, Any], bytes]:
        url = str(job["url"])
        fs, root = open_store(url, self._options)
        remote = RemoteCapture(fs, root)
        progress = self._progress(number)
        if job["do"] == "upload":
            task = UploadJob(
                folder=Path(job["folder"]),
                url=url,
                capture=job["capture"],
                known={name: (size, sha256) for name, (size, sha256) in job["known"].items()},
                damaged=job["damaged"],
            )
            sink = sink_for(scheme_of(url), fs, self._throttle.share(str(job["user"])))
            digest, size = upload_capture(task, sink, remote, progress)
            return {"manifest_sha256": digest, "size": size}, b""
        if job["do"] == "remove":
            remote.remove()
            return {}, b""
        manifest = self._manifest(remote, url, str(job["manifest_sha256"]))
        if job["do"] == "read":
            return {}, _read(manifest, remote, str(job["name"]), int(job["block"]))
        return {"files": [_check(remote, name, manifest, progress) for name in manifest.files]}, b""

    def _manifest(self, remote: RemoteCapture, url: str, sha256: str) -> Manifest:
        key = url, sha256
        if key not in self._manifests:
            if len(self._manifests) >= _MANIFESTS:
                self._manifests.clear()
            self._manifests[key] = remote.manifest(sha256)
        return self._manifests[key]

    def _progress(self, number: int) -> Callable[[int], None]:
        done, told_at = 0, time.monotonic()

        def progress(more: int) -> None:
            nonlocal done, told_at
            if number in self._cancelled:
                raise Cancelled
            done += more
            if time.monotonic() - told_at >= PROGRESS_PERIOD_S:
                told_at = time.monotonic()
                self._say({"id": number, "progress": done})

        return progress

    def _problem(self, exc: Exception) -> dict[str, Any]:
        known = isinstance(exc, UploadError)
        text = str(exc) if known else store_error(exc)
        kind = next((name for kind, name in _KINDS.items() if isinstance(exc, kind)), "store")
        problem = {"kind": kind, "error": redacted(text, self._secrets | secrets_of())}  # including renewed ones
        return {**problem, "path": exc.path} if isinstance(exc, LocalDamage) else problem

    def _say(self, answer: Mapping[str, Any], data: bytes = b"") -> None:
        header = {**answer, "bytes": len(data)} if data else answer
        with self._writing:
            self._output.write(json.dumps(header).encode() + b"\n" + data)
            self._output.flush()


_KINDS = {LocalDamage: "local-damage", RemoteDamage: "remote-damage", Cancelled: "cancelled"}


def _read(manifest: Manifest, remote: RemoteCapture, name: str, block: int) -> bytes:
    stored = manifest.files.get(name)
    if stored is None:
        raise RemoteDamage(f"{remote.path(name)} is not in the manifest")
    return remote.block(name, stored, block)


def _check(remote: RemoteCapture, name: str, manifest: Manifest, progress: Callable[[int], None]) -> list[Any]:
    stored = manifest.files[name]
    try:
        remote.verify(name, stored, alive=progress)
    except RemoteDamage as exc:
        return [name, stored.size_bytes, str(exc)]
    return [name, stored.size_bytes, ""]


def main(lock_path: str) -> int:
    """Runs until the end of standard input. The first line has the options."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the daemon, which then ends us
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of a library must not be taken for an answer
    with Path(lock_path).open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        options = WorkerOptions(**json.loads(sys.stdin.readline()))
        for folder in options.folders:
            with contextlib.suppress(OSError):  # the job will report it
                Path(folder).mkdir(parents=True, exist_ok=True)
        confine(Path(lock_path).parent, tuple(options.folders))
        worker = Worker(output, options)
        executor = ThreadPoolExecutor(MAX_JOBS, "job")
        for line in sys.stdin:
            job = json.loads(line)
            if job["do"] == "cancel":
                worker.cancel(int(job["job"]))
            else:
                executor.submit(worker.handle, job)
        os._exit(0)  # the next worker resumes unfinished jobs


# Confines the upload worker to what it needs of the daemon's user: the network and credentials.
#
# Called before the first thread and the first byte from a store. It keeps: the captures; read access to the code of
# this Python and the system's libraries; what it takes to resolve names, check certificates and find credentials; TCP
# and UDP. Everything else of the daemon's user is inaccessible: keys and other files, the attach helper's socket and
# every other Unix socket, other processes, capabilities, new rights. If the kernel lacks a part, the others still
# apply. Programs that supply credentials can be started, and are confined in the same way.
def confine(state_dir: Path, folders: tuple[str, ...], environ: Mapping[str, str] = os.environ) -> None:
    """Confines this process for good. folders: local ones that captures are uploaded to. Raises OSError."""
    for which in _NONE:
        resource.setrlimit(which, (0, 0))
    drop_capabilities()
    no_new_rights()
    if version := landlock.abi():
        landlock.restrict(_rules(state_dir.resolve(), folders, environ), version, network=True)
    if seccomp_filter.available():
        seccomp_filter.install(seccomp_filter.without_others)


def _rules(state_dir: Path, folders: tuple[str, ...], environ: Mapping[str, str]) -> Iterator[tuple[Path, int]]:
    yield from code(state_dir)
    for name in _SYSTEM:
        yield Path(name), landlock.READ | landlock.EXECUTE
    yield (state_dir / "captures").resolve(), landlock.OWN
    for folder in folders:
        yield Path(folder).resolve(), landlock.OWN
    if home := environ.get("HOME"):
        for name in _HOME:
            yield Path(home, name), landlock.OWN
    for name, value in environ.items():
        path = Path(value)
        named = path.is_file() or (name in _CERTIFICATES and path.is_dir())
        if named and path.is_absolute() and not name.startswith(_DAEMONS_OWN):
            yield path, landlock.READ
            if path.is_symlink():  # a token that is renewed: the link will point to another file
                yield path.parent, landlock.READ


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
