"""A daemon that a command starts for itself where none runs, so that the first command on a machine gives an answer.

Theory of operation
    The daemon's sockets, log and captures are in a temporary folder, and it ends with the command: the command stops
    it, and if the command dies, the kernel does. The folder is removed then, unless it has a trace that could not be
    downloaded.

    It is started only if no address was given and nothing listens at the usual one. The usual sockets are not used: a
    service that starts later must find them free, and a second command must not lose its daemon when the first ends.
"""

import os
import select
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kineto_protos import unix_peer
from kineto_trace.base.own_processes import python, tied_python

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.client.daemon_client import Client
from kinetoctl.errors import ChildFailed, Denied, NeedsRoot, Unreachable

START_DEADLINE_S = 30.0
STOP_DEADLINE_S = 10.0
POLL_S = 0.05
LOG_LINES = 15
NOT_PERMITTED = "ATTACH_NOT_PERMITTED"
MAX_FOLDER_CHARS = 60  # a Unix socket's whole path has room for 107
_UNIX = "unix:"
_CONNECT_LIMIT_S = 1.0


class Child:
    """A child process with a log file. If it ends early, the error shows the end of its log."""

    def __init__(
        self,
        name: str,
        arguments: tuple[str, ...],
        log: Path,
        *,
        pipe: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.name = name
        self._log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipe else stream,
                stderr=stream,
                env=dict(environ),
                start_new_session=True,  # Ctrl-C is for the command, which ends its children itself
            )

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_exc: object) -> None:
        """Sends SIGTERM, and SIGKILL if the process has not ended after STOP_DEADLINE_S."""
        self.process.terminate()
        try:
            self.process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def failed(self, what: str) -> ChildFailed:
        """The error for this child, with the end of its log."""
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:] or ["(its log is empty)"]
        return ChildFailed("\n".join([f"{self.name} {what}", *(f"  | {line}" for line in lines)]))

    def check(self) -> None:
        """Raises ChildFailed if the process has ended."""
        status = self.process.poll()
        if status is not None:
            raise self.failed(f"ended with status {status}")

    def wait_for_output(self, deadline_s: float) -> None:
        """Waits until a line arrives on the child's stdout (made with pipe=True). Raises ChildFailed."""
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], deadline_s)
        if not readable:
            raise self.failed(f"was not ready within {deadline_s:g} s")
        if not self.process.stdout.readline():
            self.process.wait()
            self.check()

    def poll(self, ready: Callable[[], bool], deadline_s: float, what: str) -> None:
        """Waits for a condition. Raises ChildFailed if the process ends before, or with `what` after the deadline."""
        end = time.monotonic() + deadline_s
        while not ready():
            self.check()
            if time.monotonic() > end:
                raise self.failed(f"{what} within {deadline_s:g} s")
            time.sleep(POLL_S)


class OwnDaemon(Client):
    """A client of a daemon that ends with the command.

    folder: what the daemon has; removed at its end.
    keeps_folder: set it if a file in the folder must stay.
    """

    outlives_command = False

    def __init__(self, folder: Path, *, timeout_s: float = 30.0) -> None:
        super().__init__(f"{_UNIX}{folder / 'kinetod.sock'}", timeout_s=timeout_s)
        self.folder = folder
        self.keeps_folder = False

    @property
    def agent_socket(self) -> Path:
        """Where agents of `kinetoctl run` can reach it."""
        return self.folder / "agent.sock"


@contextmanager
def own_daemon(prefix: str, *, timeout_s: float = 30.0) -> Iterator[OwnDaemon]:
    """Starts a daemon and yields its client once it answers. prefix: of its folder's name. Raises ChildFailed."""
    parent = tempfile.gettempdir()
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent if len(parent) <= MAX_FOLDER_CHARS else "/tmp"))
    client = OwnDaemon(folder, timeout_s=timeout_s)
    arguments = ["--listen", client.address, "--agent-socket", str(client.agent_socket)]
    arguments += ["--state-dir", str(folder / "state")]
    command, log = tied_python("kinetod", *arguments), folder / "kinetod.log"
    environ = {**os.environ, "TMPDIR": str(folder)}  # what its processes leave when they are killed goes, too
    try:
        with Child("the daemon", command, log, environ=environ) as child, client:
            child.poll(lambda: _answers(client), max(START_DEADLINE_S, timeout_s), "did not answer")
            yield client
    finally:
        if not client.keeps_folder:
            shutil.rmtree(folder, ignore_errors=True)


def _answers(client: Client) -> bool:
    try:
        client.host()
    except Unreachable:
        return False
    return True


@contextmanager
def reachable_daemon(settings: CommonOptions, say: Callable[..., object]) -> Iterator[Client]:
    """Yields a client of the daemon that runs here, or else of one that is started for the command.

    say: prints a line about that, unless --quiet was given; console.say, which this module may not import.
    """
    if settings.address_given or not _nobody_listens(settings.address):
        with Client(settings.address, timeout_s=settings.timeout_s) as client, _with_roots_command(client):
            yield client
        return
    if not settings.quiet:
        say("kinetod is not running here: starting one for the duration of this command", err=True)
    with own_daemon("kinetoctl-", timeout_s=settings.timeout_s) as own, _with_roots_command(own):
        yield own


@contextmanager
def _with_roots_command(client: Client) -> Iterator[None]:
    """Adds root's command to what the kernel does not let the daemon do, if it would help."""
    try:
        yield
    except Denied as exc:
        if exc.reason_code == NOT_PERMITTED and has_only_our_rights(client):
            raise NeedsRoot(exc, command_of_root()) from exc
        raise


def has_only_our_rights(client: Client) -> bool:
    """Returns whether the daemon runs on this host as this user, who is not root: one of root could do more."""
    if isinstance(client, OwnDaemon):
        return os.geteuid() != 0
    if not os.geteuid() or not client.address.startswith(_UNIX):
        return False
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_LIMIT_S)
        try:
            connection.connect(client.address.removeprefix(_UNIX))
            return unix_peer.credentials(connection)[1] == os.geteuid()
        except OSError:
            return False


def command_of_root() -> str:
    """This command, as root would run it, whatever path sudo searches; without the address of a user's daemon."""
    given, words = iter(sys.argv[1:]), []
    for word in given:
        if word == "--address":
            next(given, None)
        elif not word.startswith("--address="):
            words.append(word)
    return f"sudo {shlex.join(python('kinetoctl', *words))}"


def _nobody_listens(address: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_LIMIT_S)
        try:
            connection.connect(address.removeprefix(_UNIX))
        except (FileNotFoundError, ConnectionRefusedError):
            return True
        except OSError:  # the client says what is wrong with it
            return False
    return False
