"""A user whose process becomes another user's by execve while a trace of it is taken; needs root.

    with Race(folder, deployment="root") as race:
        outcome = race.attempt(step="stopped", agent=False, uid=BOB)
        assert not outcome.wrong

ada's process has a thread that waits for a byte and then executes a set-user-id program, which goes on as a Python of
bob's (or of root's) with a function that no trace of ada's may hold. `step` is where the daemon waits (stepped.py) for
that byte to be sent and bob's program to run; without one it is sent after `delay_s`.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kineto_protos.v1 import profiler_pb2 as pb
from support.service import attach_service
from support.service.calls_as import OK, CallsAs, plain_python
from support.service.daemon import REPOSITORY, Daemon, patient_deadlines, watch_to_end
from support.service.stepped import DAEMON_STEPS, HELPER_STEPS, IN_THE_STOP, SERVICE_STEPS
from support.waiting import scaled, until

ADA, BOB, FRONT_END = 61011, 61012, 64995
SECRET = b"secret_of_bob"
STEPPED = Path(__file__).parents[2] / "support" / "service" / "stepped.py"
SOURCES = Path(__file__).parent
CHANGED_S = 5.0
ATTACH_S = 3 * CHANGED_S  # an attach may have to wait for the change
_EXECVE = b"221 " if os.uname().machine == "aarch64" else b"59 "
ROOT_DAEMON, WITH_HELPER = "root daemon", "front end and helper"
POLICY = f'callers = [{FRONT_END}]\nroot = "always"\n'  # the policy alone would not keep root's processes out
SETTINGS = '[access]\naudit_file = "{audit}"\nrequests_per_second = 100000\nquota_per_user = "0"\n'
DURATION_NS = 40_000_000

ADAS = """
import ctypes, json, os, sys, time
library, arguments, agent = json.loads(sys.argv[1])
words = [word.encode() for word in arguments]
exec_when = ctypes.CDLL(library).exec_when
def own_of_ada():
    end = time.monotonic() + 0.002
    while time.monotonic() < end: pass
def main():
    argv = (ctypes.c_char_p * (len(words) + 1))(*words, None)
    if agent:
        sys.path.insert(0, agent)
        import kineto_agent
        kineto_agent.start()
    exec_when(0, argv)
    os.write(1, b"ready %d\\n" % os.getpid())
    while True:
        own_of_ada()
        time.sleep(0.0005)
main()
"""
BOBS = """
import os, sys, time
def secret_of_bob():
    end = time.monotonic() + 0.002
    while time.monotonic() < end: pass
if len(sys.argv) > 1:
    sys.path.insert(0, sys.argv[1])
    import kineto_agent
    kineto_agent.start()
os.write(1, b"changed\\n")
while True:
    secret_of_bob()
    time.sleep(0.0005)
"""


@dataclass
class Outcome:
    """The outcome of one attempt. wrong: what must not happen."""

    result: str = ""
    pid: int = 0
    reached: bool = True  # the step
    changed: bool = False  # bob's program ran
    wrong: list[str] = field(default_factory=list)


class _Steps:
    """Answers whatever stops at a step: at once, or when the chosen step's action is done."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        path.chmod(0o666)
        self._listener.listen(64)
        self.step = ""
        self.action: Callable[[], None] = self.close
        self.reached = threading.Event()
        threading.Thread(target=self._serve, name="steps", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(sock,), daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            if sock.recv(64).decode() == self.step and not self.reached.is_set():
                self.reached.set()
                self.action()
            sock.send(b"g")

    def close(self) -> None:
        self._listener.close()


class _Target:
    """Ada's process, which is traced."""

    def __init__(self, race: Race, uid: int, *, agent: bool) -> None:
        become = [str(race.become), str(uid), race.python, "-I", "-S", str(race.bobs)]
        folder = str(REPOSITORY / "agent") if agent else ""
        given = json.dumps([str(race.library), become + ([folder] if agent else []), folder])
        self.process = subprocess.Popen(
            [*plain_python(ADA), "-I", "-S", "-c", ADAS, given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"KINETO_AGENT_SOCKET": str(race.daemon.agent_socket)},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith(b"ready")
        self.changed = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        if self.process.stdout.readline() == b"changed\n":
            self.changed.set()

    def change(self) -> None:
        """Tells the process to become another user's."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(b"x")
            self.process.stdin.flush()

    def executes(self) -> bool:
        """Whether a thread is in execve, which waits for the end of the others: also of one that is stopped."""
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self.process.pid}/task").iterdir():
                with contextlib.suppress(OSError):
                    if (task / "syscall").read_bytes().startswith(_EXECVE):
                        return True
        return False

    def traces_of_us(self) -> list[str]:
        """What an attach has left in bob's program."""
        found = []
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.process.pid}/maps").read_text().splitlines():
                if line.startswith("6b696e65") or "kineto-" in line:
                    found.append(f"mapped: {line}")
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


class Race:
    """A deployment and ada. steps: whether the deployment can be stopped at steps."""

    def __init__(self, deployment: str, *, steps: bool) -> None:
        self.deployment = deployment
        self.steps_of = {**DAEMON_STEPS, **HELPER_STEPS, **(SERVICE_STEPS if deployment == WITH_HELPER else {})}
        self._stack = contextlib.ExitStack()
        root = Path(tempfile.mkdtemp(prefix="race-"))
        self._stack.callback(shutil.rmtree, root, ignore_errors=True)
        root.chmod(0o755)
        self.become, self.library, self.bobs = root / "become", root / "exec_when.so", root / "bobs.py"
        subprocess.run(["cc", SOURCES / "become.c", "-o", self.become], check=True)
        self.become.chmod(0o4755)
        subprocess.run(["cc", "-shared", "-fPIC", SOURCES / "exec_when.c", "-o", self.library, "-lpthread"], check=True)
        self.bobs.write_text(BOBS)
        self.python = plain_python(0)[-1]
        self._steps = _Steps(root / "steps") if steps else None
        environ = {"STEPS": str(root / "steps")} if steps else {}
        self.audit = root / "audit"
        self.audit.mkdir()
        self.audit.chmod(0o777)
        self.audit /= "audit.jsonl"
        config = root / "config.toml"
        config.write_text(SETTINGS.format(audit=self.audit))
        self.service: attach_service.Service | None = None
        if deployment == WITH_HELPER:
            folder = root / "service"
            folder.mkdir()
            self.service = _SteppedService(folder, environ)
            self._stack.callback(self.service.close)
            self.service.start()
            environ = {**environ, "KINETOD_ATTACH_HELPER_SOCKET": str(self.service.socket)}
        uid = FRONT_END if deployment == WITH_HELPER else None
        environ |= patient_deadlines(ATTACH_S)
        self.daemon = _SteppedDaemon(root, ("--config", str(config)), uid=uid, environ=environ)
        root.chmod(0o755)
        if uid is not None:
            self._move_sockets(uid)
        self._stack.callback(self.daemon.kill)
        self.daemon.start()
        self._ada = self._stack.enter_context(CallsAs(ADA))

    def _move_sockets(self, uid: int) -> None:
        """Agents trust a socket of another user's only if its folder lies in /run."""
        folder = Path(tempfile.mkdtemp(prefix="kineto-race-", dir="/run"))
        self._stack.callback(shutil.rmtree, folder, ignore_errors=True)
        os.chown(folder, uid, uid)
        folder.chmod(0o755)
        daemon = self.daemon
        daemon.runtime_dir, daemon.rpc_socket = folder, folder / "kinetod.sock"
        daemon.agent_socket, daemon.address = folder / "agent.sock", f"unix:{daemon.rpc_socket}"

    def __enter__(self) -> Race:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._steps is not None:
            self._steps.close()
        self._stack.close()

    @contextlib.contextmanager
    def _target(self, uid: int, *, agent: bool) -> Iterator[_Target]:
        target = _Target(self, uid, agent=agent)
        try:
            yield target
        finally:
            target.end()

    def attempt(self, step: str = "", *, uid: int = BOB, agent: bool = False, delay_s: float = 0.0) -> Outcome:
        """Requests one trace as ada."""
        outcome = Outcome()
        with self._target(uid, agent=agent) as target, contextlib.ExitStack() as stack:
            outcome.pid = target.process.pid
            if step and agent:
                said = f"agent of process {outcome.pid} (uid {ADA}) has connected"
                until(lambda: said in self.daemon.log(), said)
            if step:
                assert self._steps is not None
                self._steps.reached.clear()
                self._steps.step = step

                def act() -> None:
                    target.change()
                    if step in IN_THE_STOP:
                        until(lambda: target.executes() or target.changed.is_set(), "it executes", CHANGED_S)
                    else:
                        target.changed.wait(scaled(CHANGED_S))

                self._steps.action = act
            else:
                timer = threading.Timer(delay_s, target.change)
                stack.callback(timer.cancel)
                timer.start()
            self._trace(target, outcome)
            outcome.reached = not step or (self._steps is not None and self._steps.reached.is_set())
            if step in IN_THE_STOP and outcome.reached:  # it has been told to, and does so as soon as it may run again
                target.changed.wait(scaled(CHANGED_S))
            outcome.changed = target.changed.is_set()
            if target.changed.is_set():
                outcome.wrong += [each for each in target.traces_of_us() if not agent]
        if self._steps is not None:
            self._steps.step = ""
        return outcome

    def _trace(self, target: _Target, outcome: Outcome) -> None:
        pid = target.process.pid
        spec = pb.CaptureSpec(selector=pb.Selector(pids=[pid]), duration_ns=DURATION_NS)
        spec.activity_types.append("python_function")
        answer = self._ada.call(self.daemon.address, "CreateCapture", pb.CreateCaptureRequest(spec=spec))
        if answer.code != OK:
            outcome.result = answer.reason
            if " -S /" in answer.message or f"uid {BOB}" in answer.message or f"are {BOB}" in answer.message:
                outcome.wrong.append(f"ada is told what runs there: {answer.message}")
            return
        capture_id = answer.only.id
        capture = watch_to_end(self.daemon.stub(), capture_id)
        (found,) = capture.targets
        outcome.result = found.reason_code or "DONE"
        if found.process.uid != ADA:
            outcome.wrong.append(f"a capture of a process of uid {found.process.uid}")
        if found.files:
            fetched = self._ada.call(self.daemon.address, "FetchTrace", pb.FetchTraceRequest(capture_id=capture_id))
            data = b"".join(chunk.data for chunk in fetched.messages)
            if SECRET in (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data):
                outcome.wrong.append("ada has bob's functions")
        self._ada.call(self.daemon.address, "DeleteCapture", pb.DeleteCaptureRequest(id=capture_id))

    def audited(self) -> list[dict[str, object]]:
        """The complete lines of the audit log."""
        whole = self.audit.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]


class _SteppedDaemon(Daemon):
    def command(self) -> list[str]:
        command = super().command()
        if "STEPS" in self.environ:
            at = command.index("-m")
            command[at : at + 1] = [str(STEPPED)]
        return command


class _SteppedService(attach_service.Service):
    def __init__(self, root: Path, environ: dict[str, str]) -> None:
        root.chmod(0o755)
        super().__init__(root)
        self.policy.write_text(POLICY)
        self._environ = environ

    def start(self) -> None:
        if not self._environ:
            super().start()
            return
        before, os.environ["STEPS"] = attach_service.MODULE, self._environ["STEPS"]
        attach_service.MODULE = (str(STEPPED), "kinetod.attach_helper")
        try:
            super().start()
        finally:
            attach_service.MODULE = before
            del os.environ["STEPS"]
