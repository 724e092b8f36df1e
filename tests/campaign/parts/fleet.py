"""A simulated fleet: many daemons with many agents on one machine, some of them broken.

    with running_fleet(3, agents=2) as fleet:
        stub_of(fleet.hosts[0].address)

Each host has a Unix socket, a store and agents of its own (`fleet_hosts`, `fleet_agents`). Several hosts share a
process and therefore a clock, which may be shifted.
"""

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from campaign.parts import fleet_agents, fleet_hosts
from campaign.parts.fleet_hosts import AGENT_SOCKET, RPC_SOCKET, STATE_DIR
from campaign.parts.fleet_hosts import FAR as FAR
from campaign.parts.fleet_hosts import FINE as FINE
from campaign.parts.fleet_hosts import LATE as LATE
from campaign.parts.fleet_hosts import SLOW as SLOW
from campaign.parts.fleet_hosts import UNSTEADY as UNSTEADY
from support.machine.shifted_clock import ShiftedClock
from support.service.daemon import child_environ

ABSENT, REFUSING, SILENT = "absent", "refusing", "silent"  # without a daemon: nothing there, nobody there, no answer
DEAD = (ABSENT, REFUSING, SILENT)
STEP_NS = 100_000_000
END_S = 60.0


@dataclass(frozen=True, slots=True)
class FleetHost:
    """One host. pids: those by which its daemon knows its agents; shift_s: its clock's lead over the machine's."""

    name: str
    folder: Path
    kind: str
    ranks: range
    shift_s: int

    @property
    def address(self) -> str:
        """Address of the host's daemon."""
        return f"unix:{self.folder / RPC_SOCKET}"

    @property
    def state_dir(self) -> Path:
        """State directory of the host's daemon."""
        return self.folder / STATE_DIR


@dataclass(frozen=True, slots=True)
class Fleet:
    """All hosts, in the order of their ranks. pids: of the processes that simulate them."""

    folder: Path
    hosts: Sequence[FleetHost]
    pids: Sequence[int]

    def hosts_file(self) -> Path:
        """Makes a file for `kinetoctl --hosts`: one line for each host, with its name and its address."""
        path = self.folder / "hosts"
        path.write_text("".join(f"{host.name} {host.address}\n" for host in self.hosts))
        return path

    def log(self) -> str:
        """Output of the fleet's processes."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*/*.log")))


@contextlib.contextmanager
def running_fleet(
    count: int = 3,
    *,
    agents: int = 2,
    broken: Mapping[int, str] | None = None,
    slow_s: float = 60.0,
    shifts_s: Sequence[int] = (0,),
    workers: int = 1,
    step_ns: int = STEP_NS,
    within: Path | None = None,
) -> Iterator[Fleet]:
    """Runs the given number of hosts and agents until the end of the block.

    broken: how each broken host, by its number, is broken: SLOW, LATE, UNSTEADY, FAR, or one of DEAD. slow_s: delay
    with which a slow host makes captures, and a late one starts them. shifts_s: the hosts are spread over one process
    for each value, whose clock is that many seconds ahead. workers: number of decoders in each process. step_ns:
    length of an iteration. within: the folder for all files, which must have a short path.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="fleet-", dir=within))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        hosts = []
        for number in range(count):
            ranks = range(number * agents, (number + 1) * agents)
            host_folder = folder / f"node{number:03d}"
            host_folder.mkdir(mode=0o700)
            kind, shift_s = (broken or {}).get(number, FINE), shifts_s[number % len(shifts_s)]
            hosts.append(FleetHost(host_folder.name, host_folder, kind, ranks, shift_s))
        groups = [_Group(folder, place, shift_s) for place, shift_s in enumerate(shifts_s)]
        for number, host in enumerate(hosts):
            if host.kind in DEAD:
                _fail(host, stack)
            else:
                groups[number % len(groups)].hosts.append(host)
        groups = [group for group in groups if group.hosts]
        plans = [group.daemons(slow_s, workers) for group in groups]
        daemons = _started(stack, "fleet_hosts", groups, plans)
        plans = [group.agents(agents, count * agents, step_ns) for group in groups]
        players = _started(stack, "fleet_agents", groups, plans)
        yield Fleet(folder, hosts, [process.pid for process in (*daemons, *players)])


class _Group:
    """Hosts of one process, which share one clock."""

    def __init__(self, folder: Path, place: int, shift_s: int) -> None:
        self.folder = folder / f"group{place}"
        self.folder.mkdir()
        self.environ = child_environ()
        self.hosts: list[FleetHost] = []
        if shift_s:
            clock = ShiftedClock(self.folder)
            clock.set_forward(shift_s)
            self.environ |= clock.environ()

    def daemons(self, slow_s: float, workers: int) -> str:
        """Plan of the group's daemons."""
        folders, kinds = [str(host.folder) for host in self.hosts], [host.kind for host in self.hosts]
        return fleet_hosts.Plan(folders, kinds, slow_s, workers).to_json()

    def agents(self, agents: int, world_size: int, step_ns: int) -> str:
        """Plan of the group's agents."""
        sockets = [str(host.folder / AGENT_SOCKET) for host in self.hosts]
        first_rank = [host.ranks.start for host in self.hosts]
        return fleet_agents.Plan(sockets, first_rank, agents, world_size, step_ns).to_json()


def _started(
    stack: contextlib.ExitStack, module: str, groups: Sequence[_Group], plans: Sequence[str]
) -> list["subprocess.Popen[str]"]:
    """Starts one process for each group. Yields once all of them are ready."""
    processes = []
    for group, plan in zip(groups, plans, strict=True):
        log = stack.enter_context((group.folder / f"{module}.log").open("ab"))
        process = subprocess.Popen(
            [sys.executable, "-m", f"campaign.parts.{module}"],
            env=group.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        stack.callback(_end, process)
        assert process.stdin is not None
        process.stdin.write(plan + "\n")
        process.stdin.flush()
        processes.append(process)
    for process in processes:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            logs = "".join((group.folder / f"{module}.log").read_text(errors="replace") for group in groups)
            raise AssertionError(f"{module} ended with status {process.wait(END_S)}\n{logs[-4000:]}")
    return processes


def _end(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    finally:
        process.stdout.close()


def _fail(host: FleetHost, stack: contextlib.ExitStack) -> None:
    """Makes a host without a daemon."""
    if host.kind == ABSENT:
        return
    listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    listener.bind(str(host.folder / RPC_SOCKET))
    if host.kind == SILENT:
        listener.listen()
