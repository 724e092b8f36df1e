"""`python -m kinetod.agents.proxy_agent PID LINK COLLECTOR [HELPER START BOOT]`: the agent of a process without Python.

Theory of operation
    The agent's own code runs here, in a process of the daemon: runner, session and the CUPTI source. LINK is a
    descriptor of its end of a link to the daemon, COLLECTOR one of the channel to kc_serve in the process PID, where
    the source's calls go. To the daemon the two look like an agent in the process, because the daemon created the link
    for that process.

    Unreadable facts about the process (its variables, the libcupti in its file system) come from the attach helper
    service on the socket HELPER, which gets the process's start time and the boot time it is relative to.

    When the link is closed, the agent ends as it does in a Python process, and then the collector's thread leaves. When
    the process is gone (or executes another program), this process ends at once, which closes the link.
"""

import os
import select
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kineto_agent.control import self_description
from kineto_agent.control.events import Conclude
from kineto_agent.control.link import Link
from kineto_agent.control.runner import Agent
from kineto_agent.protocol import wire
from kineto_agent.sources import registry
from kineto_agent.sources.cupti.activity_kinds import KINDS
from kineto_agent.sources.cupti.collector_binding import Collector
from kineto_agent.sources.cupti.gpu_activities import CuptiSource
from kineto_agent.sources.interface import SourceError, SourceRequest
from kineto_agent.steps.counting import StepCounter
from kineto_protos import unix_peer

from kinetod.attach.attach_types import AttachError
from kinetod.attach.channel.remote_collector import RemoteCollector
from kinetod.attach.inspect.cupti_search import find_cupti
from kinetod.attach_helper.helper_client import HelperUnreachable, toolkit
from kinetod.attach_helper.messages import Tools
from kinetod.processes.identity import ProcessKey, lines

PROC = Path("/proc")
_MAX_THREADS = 400
_MAX_NAME_CHARS = 64
_MAX_ENVIRON_BYTES = 1 << 20


def read_environ(pid: int, proc: Path = PROC) -> dict[str, str]:
    """The variables that the process was started with; none if they cannot be read."""
    try:
        with (proc / str(pid) / "environ").open("rb") as file:
            data = file.read(_MAX_ENVIRON_BYTES)
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in data.split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, equals, value in pairs if equals}


def is_of(channel: socket.socket, pid: int, proc: Path = PROC) -> bool:
    """Whether the process still belongs to the user who created the channel."""
    _pid, uid, _gid = unix_peer.credentials(channel)
    try:
        return bool((proc / str(pid)).stat().st_uid == uid)
    except OSError:
        return False


def inner_number(status: Path, number: int) -> int:
    """Returns the process's or thread's number in its own PID namespace. status: a /proc/.../status file."""
    try:
        for line in lines(status.read_bytes()):
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except (OSError, ValueError):
        pass
    return number


def thread_names(pid: int, proc: Path = PROC) -> dict[str, str]:
    """Maps thread ids, as CUPTI in the process reports them, to names."""
    names = {}
    try:
        tasks = sorted((proc / str(pid) / "task").iterdir(), key=lambda task: int(task.name))[:_MAX_THREADS]
    except (OSError, ValueError):
        return {}
    for task in tasks:
        try:
            name = (task / "comm").read_text(errors="replace").rstrip("\n")
        except OSError:
            continue
        names[str(inner_number(task / "status", int(task.name)))] = name[:_MAX_NAME_CHARS]
    return names


class RemoteCuptiSource(CuptiSource):
    """GPU activities of another process."""

    def __init__(
        self,
        pid: int,
        environ: Mapping[str, str],
        collector: RemoteCollector,
        find: Callable[[], str | None] | None = None,
    ) -> None:
        """find: finds its libcupti, where we may not look ourselves."""
        super().__init__(environ, f"/proc/{pid}/maps")
        self._find = find or (lambda: find_cupti(pid, environ))
        self._collector = collector

    def activity_types(self) -> list[str]:
        """All of them: a process without CUDA gets no proxy. Without a libcupti, prepare() reports that."""
        return sorted(KINDS)

    def would_yield(self, request: SourceRequest) -> bool:
        """False: there is no torch.profiler without Python."""
        return False

    def find_library(self) -> str:
        """The path of libcupti as the process sees it. Raises SourceError."""
        found = self._find()
        if found is None:
            raise SourceError(
                "CUPTI_LIBRARY",
                "libcupti was not found next to the process's CUDA libraries, or in CUDA_HOME, /usr/local/cuda, "
                "LD_LIBRARY_PATH or the system's folders (as the process sees them). Install CUPTI for its CUDA "
                "version in one of these places, then trace again",
            )
        return found

    def load_collector(self) -> Collector:
        """Returns the collector that is already loaded."""
        return self._collector


class ProxyAgent(Agent):
    """An agent that speaks for another process."""

    def __init__(
        self,
        pid: int,
        environ: Mapping[str, str],
        link: Link,
        source: RemoteCuptiSource,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(StepCounter(), sources=lambda: [source], link=link, on_end=on_end)
        self._pid = pid
        self._environ = environ

    def _hello(self) -> wire.Hello:
        offers = registry.offers(self._sources())
        hello = self_description.hello(offers, self._counter.count, self._session.capture_id, self._environ)
        return hello._replace(
            pid=inner_number(PROC / str(self._pid) / "status", self._pid),
            python_version="",
            framework="",
            plugins=0,  # the process has no Python
            argv=self_description.command_line(f"/proc/{self._pid}/cmdline"),
        )

    def _result(self, command: Conclude) -> wire.Result:
        result = super()._result(command)
        return result._replace(threads=thread_names(self._pid) if result.threads else {})


@dataclass(frozen=True, slots=True)
class Helper:
    """The attach helper service, and the process to ask about. Times are Unix nanoseconds."""

    path: Path
    key: ProcessKey
    boot_time_ns: int

    def ask(self) -> Tools:
        """Asks the service. Raises SourceError."""
        try:
            return toolkit(self.path, self.key, boot_time_ns=self.boot_time_ns)
        except HelperUnreachable as exc:
            raise SourceError("ATTACH_FAILED", f"the attach helper cannot be reached ({self.path}: {exc})") from exc
        except AttachError as exc:
            raise SourceError(exc.code, exc.reason) from exc

    def cupti(self) -> str | None:
        """The path of its libcupti as the process sees it. Raises SourceError."""
        return self.ask().cupti or None

    def environ(self) -> dict[str, str]:
        """The process's variables; empty if the service does not tell."""
        try:
            return dict(self.ask().environ)
        except SourceError as exc:
            print(f"rank and job of process {self.key.pid} are unknown: {exc}", file=sys.stderr)  # noqa: T201
            return {}


def serve(pid: int, link: socket.socket, channel: socket.socket, helper: Helper | None = None) -> None:
    """Serves until the link or the process is gone."""
    environ = read_environ(pid) if helper is None else helper.environ()
    if not is_of(channel, pid):  # after an execve in between they may be another user's
        environ = {}
    reader, writer = os.pipe2(os.O_CLOEXEC)
    collector = RemoteCollector(channel)
    source = RemoteCuptiSource(pid, environ, collector, helper.cupti if helper is not None else None)
    agent = ProxyAgent(pid, environ, Link.adopted(link), source, on_end=lambda: os.close(writer))
    agent.start()
    poller = select.poll()
    poller.register(reader, 0)  # its writer closed: the agent has ended
    poller.register(collector, 0)  # the process has closed its end
    ready = {descriptor for descriptor, _ in poller.poll()}
    if reader in ready:
        collector.leave()


def _helper(pid: int, arguments: list[str]) -> Helper | None:
    """Parses the helper's arguments. Raises ValueError."""
    if not arguments:
        return None
    path, start, boot = arguments
    return Helper(Path(path), ProcessKey(pid, int(start)), int(boot))


def main() -> int:
    """Serves; the exit status is 2 for wrong arguments."""
    try:
        pid, link, channel = map(int, sys.argv[1:4])
        helper = _helper(pid, sys.argv[4:])
        ends = [socket.socket(fileno=link), socket.socket(fileno=channel)]
    except (ValueError, OSError) as exc:
        print(f"not descriptors of a link and a collector ({exc}); only kinetod starts this program", file=sys.stderr)  # noqa: T201
        return 2
    for end in ends:
        os.set_inheritable(end.fileno(), False)
    serve(pid, ends[0], ends[1], helper)
    sys.stderr.flush()
    os._exit(0)  # without waiting for the agent's thread: the process may be gone


if __name__ == "__main__":
    sys.exit(main())
