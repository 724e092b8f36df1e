"""A real kinetod in a subprocess with its own folders, for the tests of everybody.

    with running_daemon() as daemon:
        channel = grpc.insecure_channel(daemon.address)

Readiness comes from the daemon itself (READY=1 on a notify socket): nothing polls or sleeps.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb

from support.waiting import scaled, scaled_option

REPOSITORY = Path(__file__).parents[3]
START_DEADLINE_S = 30
STOP_DEADLINE_S = 20
LOWEST_PORT = 10_000  # of those that tests take; below are services
AGENT_DEADLINE_S = 10  # the defaults of captures.agent_deadline and attach.deadline
# The packages of the repository, before what this process was told to import from.
IMPORT_PATH = os.pathsep.join(
    [
        *(str(REPOSITORY / part) for part in ("agent", "daemon", "cli", "protos")),
        *filter(None, [os.environ.get("PYTHONPATH")]),
    ]
)


def child_environ(**variables: str) -> dict[str, str]:
    """Environment of a child process that imports from the repository and from the tests' support."""
    import_path = os.pathsep.join([IMPORT_PATH, str(REPOSITORY / "tests")])
    return {**os.environ, "PYTHONPATH": import_path, **variables}


def patient_deadlines(deadline_s: float = AGENT_DEADLINE_S) -> dict[str, str]:
    """Variables of a daemon that gives agents and attaches the time that they need on this machine at present."""
    deadline = scaled_option(deadline_s)
    return {"KINETOD_AGENT_DEADLINE": deadline, "KINETOD_ATTACH_DEADLINE": deadline}


def as_user(uid: int | None) -> list[str]:
    """Prefix that runs a command as a user who may read, not write, everything: Python may lie in /root."""
    if uid is None:
        return []
    capability = "-all,+dac_read_search"
    options = ("--regid", str(uid), "--clear-groups", "--inh-caps", capability, "--ambient-caps", capability)
    return ["setpriv", "--reuid", str(uid), *options]


class DaemonFailed(Exception):
    """The daemon ended before it was ready; the text has its exit status and log."""


class Daemon:
    """One daemon and its folders. `start` may be called again after `stop` or `kill`."""

    def __init__(
        self,
        root: Path,
        options: Sequence[str] = (),
        *,
        uid: int | None = None,
        environ: Mapping[str, str] | None = None,
        state_dir: Path | None = None,
    ) -> None:
        self.root = root
        self.runtime_dir = root / "run" if uid is None else root  # directly in /run: so root vouches for the user
        self.state_dir = state_dir or root / "state"
        self.log_path = root / "kinetod.log"
        self.rpc_socket = self.runtime_dir / "kinetod.sock"
        self.agent_socket = self.runtime_dir / "agent.sock"
        self.address = f"unix:{self.rpc_socket}"
        self.options = list(options)
        self.uid = uid
        self.environ = dict(environ or {})
        self.process: subprocess.Popen[bytes] | None = None
        self.notified: list[str] = []  # what the running daemon has told its service manager
        self._channel: grpc.Channel | None = None
        self._starts = 0
        self._collector: threading.Thread | None = None
        self.runtime_dir.mkdir(exist_ok=True)
        if uid is not None:
            for folder in (root, self.runtime_dir):
                os.chown(folder, uid, uid)

    @property
    def pid(self) -> int:
        """Pid of the running daemon."""
        assert self.process is not None
        return self.process.pid

    def command(self) -> list[str]:
        """The whole command line."""
        return [
            *as_user(self.uid), sys.executable, "-m", "kinetod",
            "--listen", self.address,
            "--agent-socket", str(self.agent_socket),
            "--state-dir", str(self.state_dir),
            "--min-free-bytes", "1MiB",
            *self.options,
        ]  # fmt: skip

    def client_environ(self) -> dict[str, str]:
        """Environment of clients and targets of this daemon."""
        return {
            **os.environ,
            "PYTHONPATH": IMPORT_PATH,
            "KINETO_ADDRESS": self.address,
            "KINETO_AGENT_SOCKET": str(self.agent_socket),
            **self.environ,
        }

    def start(self) -> None:
        """Starts the daemon and returns once it says that it is ready. Raises DaemonFailed."""
        self._starts += 1
        notify_path = self.root / f"notify-{id(self)}-{self._starts}"  # two daemons may share a root
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify.bind(str(notify_path))
        with self.log_path.open("ab") as log:
            if self.uid is not None:
                os.chown(notify_path, self.uid, self.uid)
            self.process = subprocess.Popen(
                self.command(),
                env={**self._defaults(), **self.client_environ(), "NOTIFY_SOCKET": str(notify_path)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._await_ready(notify, notify_path)

    def _defaults(self) -> dict[str, str]:
        """Settings for a machine with little disk and few cores; unless a file has deadlines, also for a slow one.

        Keeping a decode worker warm takes as much CPU time as the rest of the start.
        """
        given = dict(zip(self.options, self.options[1:], strict=False)).get("--config")
        has_deadlines = given is not None and Path(given).exists() and "deadline" in Path(given).read_text()
        return {
            "KINETOD_STORE_START_FREE_BYTES": "0",
            **({} if "--decode-workers" in self.options else {"KINETOD_DECODE_WORKERS": "1"}),
            **({} if has_deadlines else patient_deadlines()),
        }

    def _await_ready(self, notify: socket.socket, notify_path: Path) -> None:
        process = self.process
        assert process is not None
        self.notified = notified = list[str]()
        known = threading.Event()

        def collect() -> None:
            with notify:
                while (message := notify.recv(4096).decode()) != "ENDED":
                    notified.append(message)
                    if "READY=1" in message:
                        known.set()
            notify_path.unlink(missing_ok=True)
            known.set()

        end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        end.connect(str(notify_path))

        def report_end() -> None:
            process.wait()
            with end:
                end.send(b"ENDED")

        threading.Thread(target=report_end, name="daemon-end", daemon=True).start()
        self._collector = threading.Thread(target=collect, name="daemon-messages", daemon=True)
        self._collector.start()
        deadline_s = scaled(START_DEADLINE_S)
        if not known.wait(deadline_s):
            self.kill()
            raise DaemonFailed(f"not ready after {deadline_s:g} s\n{self.log()}")
        if not any("READY=1" in message for message in notified):
            raise DaemonFailed(f"exit status {process.wait()}\n{self.log()}")

    def log(self) -> str:
        """What the daemon has logged so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def stop(self) -> int:
        """Sends SIGTERM and waits. Returns the exit status."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """Sends SIGKILL and waits. Returns the exit status."""
        return self._end(signal.SIGKILL)

    def disconnect(self) -> None:
        """Closes the channel; the next call connects anew."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _end(self, number: signal.Signals) -> int:
        self.disconnect()
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(scaled(STOP_DEADLINE_S))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the daemon did not stop\n{self.log()}") from None
        finally:
            self.process = None
            if self._collector is not None:
                self._collector.join(scaled(STOP_DEADLINE_S))

    def channel(self) -> grpc.Channel:
        """The daemon's one channel, closed with the daemon."""
        if self._channel is None:
            self._channel = grpc.insecure_channel(self.address)
            grpc.channel_ready_future(self._channel).result(timeout=scaled(START_DEADLINE_S))
        return self._channel

    def stub(self) -> ProfilerStub:
        """The service. The deadlines of its calls are scaled with the machine."""
        stub = ProfilerStub(self.channel())
        for name, method in vars(stub).items():
            setattr(stub, name, _Scaled(method))
        return stub


class _Scaled:
    """A method of the service with scaled deadlines."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __call__(self, request: object, timeout: float | None = None, **options: Any) -> Any:
        return self._method(request, timeout=timeout and scaled(timeout), **options)

    def with_call(self, request: object, timeout: float | None = None, **options: Any) -> Any:
        """The answer and the call."""
        return self._method.with_call(request, timeout=timeout and scaled(timeout), **options)

    def future(self, request: object, timeout: float | None = None, **options: Any) -> Any:
        """The call, not waited for."""
        return self._method.future(request, timeout=timeout and scaled(timeout), **options)


def watch_to_end(stub: ProfilerStub, capture_id: str, timeout_s: float = 60) -> pb.Capture:
    """The capture once every target has its verdict."""
    *_, last = stub.WatchCapture(pb.WatchCaptureRequest(id=capture_id), timeout=timeout_s)
    capture: pb.Capture = last.snapshot
    return capture


def watch_until_it_collects(stub: ProfilerStub, capture_id: str, timeout_s: float = 60) -> None:
    """Returns once a target of the capture collects, which the first snapshot may tell, or when all is over."""
    for event in stub.WatchCapture(pb.WatchCaptureRequest(id=capture_id), timeout=timeout_s):
        if any(each.state == pb.TARGET_STATE_COLLECT for each in (event.target, *event.snapshot.targets)):
            return


def error_of(call: Callable[[], object]) -> tuple[grpc.StatusCode, str, str]:
    """Status code, reason and message of a call that must fail."""
    try:
        result = call()
        if isinstance(result, Iterator):
            list(result)
    except grpc.RpcError as exc:
        status = rpc_status.from_call(exc)  # type: ignore[arg-type]  # it is a Call too
        assert status is not None, f"no details: {exc}"
        info = error_details_pb2.ErrorInfo()
        assert status.details[0].Unpack(info)
        assert info.domain == "kineto"
        return exc.code(), info.reason, status.message
    raise AssertionError("the call did not fail")


def free_address(host: str = "127.0.0.1") -> str:
    """An address with a port at which nothing listens now.

    It is none of those that the kernel gives to whoever connects or asks for any port: so it is still free some seconds
    later, whatever other processes do.
    """
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others = [*range(LOWEST_PORT, first), *range(last + 1, 1 << 16)]
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((host, secrets.choice(others) if others else 0))
            return f"{host}:{probe.getsockname()[1]}"


@contextlib.contextmanager
def running_daemon(
    *options: str,
    uid: int | None = None,
    environ: Mapping[str, str] | None = None,
    state_dir: Path | None = None,
) -> Iterator[Daemon]:
    """A started daemon with its own short temporary folder, stopped and removed at the end."""
    # pytest's own folders are too long for socket paths
    root = Path(tempfile.mkdtemp(prefix="kinetod-", dir=None if uid is None else "/run"))
    daemon = Daemon(root, options, uid=uid, environ=environ, state_dir=state_dir)
    try:
        daemon.start()
        yield daemon
        daemon.stop()
    finally:
        daemon.kill()
        shutil.rmtree(root, ignore_errors=True)
