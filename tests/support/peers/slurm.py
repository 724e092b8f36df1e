"""A real Slurm on this machine, with a real kinetod on each of its nodes.

Theory of operation
    Root makes namespaces (support.peers.slurm_host), so that nothing of this machine is changed: not its users, not its
    processes, not its /run. In them run munged with a key of its own, slurmctld, and for each node, in namespaces of
    the node's own, slurmd and kinetod. The nodes share the network; each slurmd has its port.

    Users of the cluster are ADA and BOB, ordinary ones. Their commands run in the cluster's namespaces: they are
    on the login node, so to speak, and reach the nodes' daemons by their sockets.
"""

import contextlib
import json
import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import grpc
from kineto_protos.services import ProfilerStub
from kineto_protos.v1 import profiler_pb2 as pb

from support.service.cli import Result
from support.service.daemon import IMPORT_PATH, REPOSITORY, free_address, patient_deadlines
from support.waiting import scaled, until

ADA, BOB = 61001, 61002
USERS = {"ada": ADA, "bob": BOB}
GPUS = 2  # of each node: device files with other numbers than Slurm gives them; nobody opens them
HOST = Path(__file__).with_name("slurm_host.py")
SCRIPTS = REPOSITORY / "deploy/slurm"
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "squeue", "scontrol", "munged")
DEADLINE_S = 60.0
LINUXPROC, CGROUP = "proctrack/linuxproc", "proctrack/cgroup"
LOOP = "import time\nwhile True: time.sleep(0.001)"
TASK = f"{sys.executable} -c '{LOOP}'"  # until the job ends
KINETOCTL = (sys.executable, "-m", "kinetoctl")
_FREEZER = Path("/sys/fs/cgroup/freezer")
CONFIG = """
ClusterName=test
SlurmctldHost={controller}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge.socket
StateSaveLocation={root}/ctld
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdSpoolDir={root}/%n/spool
SlurmdPidFile={root}/%n/slurmd.pid
SlurmdLogFile={root}/%n/slurmd.log
SlurmdParameters=config_overrides
ProctrackType={proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
GresTypes=gpu
ReturnToService=2
KillWait=1
MinJobAge=600
PrologFlags=Alloc
Prolog={scripts}/Prolog
Epilog={scripts}/Epilog
TaskProlog={scripts}/TaskProlog
{nodes}
PartitionName=test Nodes=ALL Default=YES State=UP MaxTime=10
"""


def has_freezer() -> bool:
    """Whether Slurm can make control groups here without systemd (cgroup v1)."""
    return os.access(_FREEZER, os.W_OK) and (_FREEZER / "tasks").exists()


def why_not() -> str:
    """Why the test cannot have a Slurm of its own here; empty if it can."""
    if os.geteuid() != 0:
        return "a Slurm of the test's own takes root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if missing := [name for name in (*PROGRAMS, "unshare", "nsenter") if shutil.which(name, path=path) is None]:
        return f"there is no {', '.join(missing)} (apt-get install slurm-wlm munge)"
    made = ["unshare", "--mount", "--pid", "--uts", "--fork", "--mount-proc", "/bin/true"]
    tried = subprocess.run(made, capture_output=True, text=True, check=False)
    return f"namespaces cannot be made: {tried.stderr.strip()[-200:]}" if tried.returncode else ""


class Cluster:
    """A cluster of two nodes. Commands of users run on them through `run`."""

    def __init__(self, root: Path, *, proctrack: str = LINUXPROC) -> None:
        self.root = root
        self.proctrack = proctrack
        self.work = root / "work"  # where everybody may write
        self.nodes = tuple(f"t{os.getpid()}n{number}" for number in (1, 2))  # control groups have their names
        self._channels: list[grpc.Channel] = []
        self.environ = {
            **os.environ,
            "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin",
            "SLURM_CONF": str(root / "slurm.conf"),
            "PYTHONPATH": IMPORT_PATH,
            "HOME": str(root),
        }
        self.template = f"unix:{root}/{{host}}/kinetod.sock"
        self._files(proctrack)
        separate = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self._log = (root / "cluster.out").open("wb")
        self._process = subprocess.Popen(
            [*separate, sys.executable, "-S", str(HOST), "cluster", str(root)],
            env=self.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip

    def _files(self, proctrack: str) -> None:
        self.root.chmod(0o755)
        for folder in ("ctld", *self.nodes, *(f"{node}/spool" for node in self.nodes)):
            (self.root / folder).mkdir()
        self.work.mkdir()
        self.work.chmod(0o1777)
        users = "".join(f"{name}:x:{uid}:{uid}::/:/bin/sh\n" for name, uid in USERS.items())
        (self.root / "passwd").write_text(Path("/etc/passwd").read_text() + users)
        groups = "".join(f"{name}:x:{uid}:\n" for name, uid in USERS.items())
        (self.root / "group").write_text(Path("/etc/group").read_text() + groups)
        key = self.root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        controller, *ports = (free_address().rpartition(":")[2] for _ in range(1 + len(self.nodes)))
        nodes = [
            f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={port} CPUs=8 RealMemory=100 Gres=gpu:{GPUS}"
            for node, port in zip(self.nodes, ports, strict=True)
        ]
        config = CONFIG.format(
            controller=socket.gethostname(), port=controller, root=self.root, proctrack=proctrack,
            scripts=SCRIPTS, nodes="\n".join(nodes),
        )  # fmt: skip
        (self.root / "slurm.conf").write_text(config)
        (self.root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for number in range(GPUS):
            os.mknod(self.root / f"gpu{number + 2}", stat.S_IFCHR | 0o600, os.makedev(1, 3))
        (self.root / "gres.conf").write_text(f"Name=gpu File={self.root}/gpu[2-{GPUS + 1}]\n")
        told = {
            "nodes": self.nodes,
            "open": [sys.base_prefix, sys.prefix, str(REPOSITORY)],
            "daemon_options": ["--min-free-bytes", "1MiB"],
            "daemon_environ": {"KINETOD_STORE_START_FREE_BYTES": "0", **patient_deadlines()},
        }
        (self.root / "cluster.json").write_text(json.dumps(told))

    def wait(self) -> None:
        """Waits until every node takes jobs and every daemon answers."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"started\n", self.logs()

        def idle() -> bool:
            states = self.run("sinfo", "--noheader", "--Node", "--format=%T")
            return states.stdout.split() == ["idle"] * len(self.nodes)

        until(idle, "all nodes are idle", DEADLINE_S, state=self.logs)
        for node in self.nodes:
            until(lambda node=node: self._answers(node), f"the daemon of {node} answers", DEADLINE_S, state=self.logs)  # type: ignore[misc]

    def _answers(self, node: str) -> bool:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.connect(str(self.root / node / "kinetod.sock"))
            return True
        return False

    def logs(self) -> str:
        """The ends of all logs."""
        paths = [path for pattern in ("*.out", "*.log", "*/*.out", "*/*.log") for path in self.root.glob(pattern)]
        return "".join(f"\n--- {path}\n{path.read_text(errors='replace')[-1500:]}" for path in paths)

    def run(self, *command: str, uid: int = 0, environ: Mapping[str, str] | None = None) -> Result:
        """A command of a user on the login node."""
        process = self.start(*command, uid=uid, environ=environ)
        output, errors = process.communicate(timeout=scaled(DEADLINE_S))
        return Result(process.returncode, output, errors)

    def start(
        self, *command: str, uid: int = 0, node: str = "", environ: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """A command of a user on a node, or on the login node."""
        user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"] if uid else []
        init = self._init_of(node) if node else self._init()
        enter = ["nsenter", f"--target={init}", "--mount", "--pid", "--uts", f"--wd={self.work}"]
        return subprocess.Popen(
            [*enter, *user, *command], env={**self.environ, **(environ or {})}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def kinetoctl(self, *arguments: str, uid: int) -> Result:
        """Runs kinetoctl as a user of the cluster."""
        return self.run(*KINETOCTL, *arguments, uid=uid, environ={"KINETO_HOST_ADDRESS": self.template})

    def submit(self, *options: str, uid: int = ADA) -> int:
        """The id of a new job of a user, by sbatch; it need not run yet."""
        done = self.run("sbatch", "--parsable", "--output=/dev/null", *options, uid=uid)
        assert done.code == 0, done.stderr + self.logs()
        return int(done.stdout)

    def ids(self, *names: str) -> list[int]:
        """The ids of parts of jobs, once they run."""

        def found() -> list[int] | None:
            listed = self.run("squeue", "--array", "--noheader", "--states=RUNNING", "--format=%i %A").stdout.split()
            running = dict(zip(listed[::2], listed[1::2], strict=True))
            return [int(running[name]) for name in names] if running.keys() >= set(names) else None

        return until(found, f"{', '.join(names)} run", DEADLINE_S, state=self.logs)

    def trace(self, name: str, *options: str, uid: int = ADA) -> Result:
        """Runs `kinetoctl trace` of a Slurm job, for a short time."""
        return self.kinetoctl("trace", "--slurm-job", name, "--duration", "200ms", "-o", "json", *options, uid=uid)

    def ready(self, ids: Sequence[int], count: int) -> None:
        """Waits until that many processes of these jobs have a waiting agent."""
        request = pb.ListProcessesRequest(selector=pb.Selector(job_ids=map(str, ids), helpers=True))

        def states() -> list[int]:
            answers = (stub.ListProcesses(request, timeout=scaled(DEADLINE_S)) for stub in self.stubs())
            return [process.agent_state for answer in answers for process in answer.processes]

        expected = [pb.AGENT_STATE_READY] * count
        what = f"{count} processes are ready"
        until(lambda: states() == expected, what, DEADLINE_S, state=self.logs, pause_s=0.2)

    def stubs(self) -> list[ProfilerStub]:
        """The nodes' daemons, to root."""
        if not self._channels:
            self._channels = [grpc.insecure_channel(self.template.format(host=node)) for node in self.nodes]
        return [ProfilerStub(channel) for channel in self._channels]

    def end_jobs(self) -> None:
        """Cancels all jobs and waits until none is left."""
        self.run("scancel", "--partition=test")
        until(lambda: not self.run("squeue", "--noheader").stdout, "no job is left", DEADLINE_S, state=self.logs)

    def on(self, node: str, *command: str) -> str:
        """Runs a command as root on a node. Returns its output."""
        output, errors = self.start(*command, node=node).communicate(timeout=scaled(DEADLINE_S))
        return output + errors

    def _init_of(self, node: str) -> int:
        """The node's first process; the last of those who were started for it."""
        return max(pid for pid in _pids() if _command(pid)[-3:] == ["node", str(self.root), node])

    def _init(self) -> int:
        pid = self._process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def close(self) -> None:
        """Ends all processes of the cluster."""
        for channel in self._channels:
            channel.close()
        self._process.communicate()  # it ends with its standard input
        self._log.close()
        for group in (_FREEZER / f"slurm_{node}" for node in self.nodes):
            for folder in sorted(group.rglob("*/"), reverse=True):
                folder.rmdir()
            if group.exists():
                group.rmdir()


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal())


def _command(pid: int) -> Sequence[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    return [""]


@contextlib.contextmanager
def running_cluster(**options: str) -> Iterator[Cluster]:
    """Started and ready; ended and removed at the end."""
    root = Path(tempfile.mkdtemp(prefix="slurm-"))
    cluster = Cluster(root, **options)
    try:
        cluster.wait()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(root, ignore_errors=True)
