"""The attach helper service as systemd starts it: another user, few capabilities, the socket passed. Needs root."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from support.service.daemon import IMPORT_PATH
from support.waiting import scaled, until

# The service's own user is another one in each worker of pytest-xdist: folders in /tmp are told from others' by it.
SERVICE_UID = 64960 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 30
CALLER_UID, OWNER_UID = 64991, 64992
CAPABILITIES = (
    "sys_ptrace",
    "dac_read_search",
    "sys_admin",
    "sys_nice",
    "setuid",
    "setgid",
)  # as in the unit; a test compares
MODULE = ("-m", "kinetod.attach_helper")
POLICY = f'callers = [{CALLER_UID}]\nroot = "containers"\n'
_START = 'LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"'  # the pid is known only to who has it
_LISTEN_FD = 3


def unprivileged(uid: int, *capabilities: str) -> list[str]:
    """Prefix that runs a command as that user with these capabilities only, in the bounding set too."""
    listed = ",".join(["-all", *(f"+{name}" for name in capabilities)])
    sets = ("--inh-caps", listed, "--ambient-caps", listed, "--bounding-set", listed)
    return ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--no-new-privs", *sets]


def as_caller(uid: int, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python code as that user, who may read (not write) everything: Python may lie in /root."""
    return subprocess.run(
        [*unprivileged(uid, "dac_read_search"), sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": IMPORT_PATH},
        capture_output=True,
        text=True,
        timeout=scaled(60),
    )


def own_folders() -> list[Path]:
    """The folders in /tmp of this worker's attach helper. Others in /tmp come and go meanwhile."""
    found = []
    for path in Path("/tmp").glob("kinetod-*"):
        with contextlib.suppress(FileNotFoundError):
            if path.lstat().st_uid == SERVICE_UID:
                found.append(path)
    return found


class Service:
    """A running helper service; by default the attach helper. name: of its socket and of its policy."""

    def __init__(
        self,
        root: Path,
        *options: str,
        name: str = "attach",
        module: Sequence[str] | None = None,
        capabilities: Sequence[str] = CAPABILITIES,
        policy: str = POLICY,
        prefix: Sequence[str] = (),
    ) -> None:
        self.root = root
        self.socket = root / f"{name}.sock"
        self.policy = root / f"{name}.toml"
        self.policy.write_text(policy)
        self._module = module
        self._capabilities = capabilities
        self._log = root / "log"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.socket))
        self._listener.listen(8)
        self.socket.chmod(0o666)  # whom the socket's mode lets through is systemd's part
        self._options = options
        self._prefix = prefix
        self._logged_before = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the service as systemd does at the first connection. Does not wait, since the socket exists."""
        command = [
            *self._prefix,
            *unprivileged(SERVICE_UID, *self._capabilities),
            "sh", "-c", _START, "sh",
            sys.executable, *(self._module or MODULE), "--policy", str(self.policy), *self._options,
        ]  # fmt: skip
        with self._log.open("ab") as log:
            self._logged_before = log.tell()
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": IMPORT_PATH},
                stdin=subprocess.DEVNULL,
                stderr=log,
                preexec_fn=self._pass_listener,
                close_fds=False,
            )

    def _pass_listener(self) -> None:
        if self._listener.fileno() == _LISTEN_FD:
            os.set_inheritable(_LISTEN_FD, True)
        else:
            os.dup2(self._listener.fileno(), _LISTEN_FD)

    def stop(self) -> None:
        """Stops the service if it runs. One that is still starting would be killed by the signal, so it is awaited."""
        if (process := self.process) is not None:
            until(lambda: self._serves() or process.poll() is not None, "the service serves", state=self.log)
            process.terminate()
            assert process.wait(scaled(20)) == 0, self.log()
            self.process = None

    def _serves(self) -> bool:
        return b" serves\n" in self._log.read_bytes()[self._logged_before :]

    def log(self) -> str:
        """What the service has logged so far."""
        return self._log.read_text()

    def logged(self, text: str) -> None:
        """Waits until it has logged that."""
        until(lambda: text in self.log(), f"the service logs {text!r}", state=self.log)

    def close(self) -> None:
        """Ends it, however that may be."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self._listener.close()


@contextlib.contextmanager
def running(*options: str, **how: Any) -> Iterator[Service]:
    """A started service with its own folder. how: as Service has it."""
    root = Path(tempfile.mkdtemp(prefix="kinetod-attach-"))
    root.chmod(0o755)
    service = Service(root, *options, **how)
    try:
        service.start()
        yield service
        service.stop()
    finally:
        service.close()
        shutil.rmtree(root, ignore_errors=True)
