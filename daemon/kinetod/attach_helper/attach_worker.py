"""`python -m kinetod.attach_helper.attach_worker`: the process that attaches, kept warm by `attach_pool.AttachHelpers`.

Theory of operation
    Standard input is a SOCK_SEQPACKET socket. One packet is one request, a JSON object:
        {"id", "pid", "start_time_ns", "boot_time_ns", "approved", "deadline_s", "token", "debug"}
    and one packet its answer:
        {"id", "ok": true, "method", "stopped_ns", "latency_ns"} and the channel's descriptor (SCM_RIGHTS)
        {"id", "ok": false, "code", "reason"}
    With "do" it is a query, not an attach; a helper answers it because reading a hostile process can block
    (`worker_queries.py`, `folder_queries.py`); the answer is {"id", "ok": true, …}. A query may come with a descriptor,
    and so may its answer. With "debug" each step of the attach is a line on standard error, which the daemon logs. The
    process ends when the socket is closed. It may be killed at any moment: the target continues.

    Everything that an attach needs is imported, and the agent packed, before the first request.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kinetod.attach.attach_types import AttachCode, Attached, AttachError, AttachRequest, Deadline
from kinetod.attach_helper import folder_queries, worker_queries
from kinetod.base.unix_sockets import DESCRIPTORS_SPACE, descriptors
from kinetod.processes.credentials import Credentials
from kinetod.processes.identity import BOOT_TIME_NS, ProcessKey

MAX_REQUEST_BYTES = 32 << 10  # signs of plug-ins are the largest part: messages.MAX_SIGNS_BYTES, escaped
OOM_SCORE_ADJ = -1000  # while a thread of the target is stopped, its tracer should not be the OOM victim
_STEPS = logging.getLogger("kinetod.attach_helper.attempt")
_LEFT_AS_THEY_ARE = {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGCHLD, signal.SIGCONT),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS),
}

Attempt = Callable[[AttachRequest], tuple[Attached, socket.socket]]


def parse(data: bytes) -> tuple[int, AttachRequest]:
    """Returns the id and the request in a packet. Raises ValueError."""
    fields = json.loads(data)
    try:
        request = AttachRequest(
            key=ProcessKey(int(fields["pid"]), int(fields["start_time_ns"])),
            approved=Credentials.from_dict(fields["approved"]),
            deadline=Deadline(float(fields["deadline_s"])),
            token=int(fields["token"]),
            boot_time_ns=int(fields.get("boot_time_ns", BOOT_TIME_NS)),
            received_ns=time.monotonic_ns(),
        )
        return int(fields["id"]), request
    except (KeyError, TypeError) as exc:
        raise ValueError(f"not a request: {exc!r}") from exc


def answer(data: bytes, attempt: Attempt, descriptor: int | None = None) -> tuple[dict[str, Any], int | None]:
    """Carries out one request. descriptor: received with it. The caller owns the answer's descriptor."""
    fields = json.loads(data)
    if fields.get("do") == folder_queries.FOLDER:
        said, found = folder_queries.answer(fields, descriptor)
        return {"id": int(fields["id"]), "ok": True, **said}, found
    if "do" in fields:
        return {"id": int(fields["id"]), "ok": True, **worker_queries.answer(fields)}, None
    number, request = parse(data)
    _STEPS.setLevel(logging.DEBUG if fields.get("debug") else logging.WARNING)
    pid = request.key.pid
    try:
        if pid in (os.getpid(), os.getppid()):
            raise AttachError(
                AttachCode.UNSUITABLE,
                f"process {pid} is kinetod itself or its attach helper, which cannot be traced; choose another process",
            )
        request.check_process()
        attached, channel = attempt(request)
    except AttachError as exc:
        error = request.explained(exc)
        return {"id": number, "ok": False, "code": error.code, "reason": error.reason}, None
    except Exception as exc:  # noqa: BLE001  # of this process, which goes on; the daemon logs its standard error
        traceback.print_exc()
        reason = (
            f"attaching to process {pid} failed unexpectedly ({type(exc).__name__}); the daemon's log has the details"
        )
        return {"id": number, "ok": False, "code": AttachCode.FAILED, "reason": reason}, None
    said = {"method": attached.method, "stopped_ns": attached.stopped_ns, "latency_ns": attached.latency_ns}
    return {"id": number, "ok": True, **said}, channel.detach()


def serve(sock: socket.socket, attempt: Attempt) -> None:
    """Answers requests until the socket is closed. Raises ValueError on a packet that is not a request."""
    while True:
        try:
            data, ancillary, _, _ = sock.recvmsg(MAX_REQUEST_BYTES, DESCRIPTORS_SPACE, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:
            return
        if not data:
            return
        with contextlib.ExitStack() as open_ones:
            came = descriptors(ancillary)
            for each in came:
                open_ones.callback(os.close, each)
            fields, descriptor = answer(data, attempt, came[0] if came else None)
            if descriptor is not None:
                open_ones.callback(os.close, descriptor)
            try:
                socket.send_fds(sock, [json.dumps(fields).encode()], [] if descriptor is None else [descriptor])
            except (BrokenPipeError, ConnectionError):
                return  # the daemon is gone; the agent leaves when its channel is closed


def _quiet_signals() -> None:
    """Ignores signals such as a Ctrl-C in the daemon's terminal, which the daemon handles."""
    for number in signal.valid_signals() - _LEFT_AS_THEY_ARE:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)


def main() -> int:
    """Serves on standard input; the exit status is 2 if that is not such a socket."""
    from kinetod.attach.inject.watchdog import WATCHDOG
    from kinetod.attach_helper.attempt import attach, warm_up

    _quiet_signals()
    logging.basicConfig(format="%(message)s")
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE_ADJ))
    try:
        sock = socket.socket(fileno=0)
        if (sock.family, sock.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
            raise OSError("it is a different kind of socket")
    except OSError as exc:
        print(f"standard input is not a seqpacket socket ({exc}); only kinetod starts this program", file=sys.stderr)  # noqa: T201
        return 2
    with contextlib.suppress(OSError):  # no process is left to us: attaches are as safe, except when we are stopped
        WATCHDOG.start()
    warm_up()
    with sock:
        serve(sock, attach)
    return 0


if __name__ == "__main__":
    sys.exit(main())
