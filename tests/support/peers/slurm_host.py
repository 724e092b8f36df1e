"""As root in namespaces of its own: `slurm_host.py cluster ROOT` and, started by that, `slurm_host.py node ROOT NAME`.

A cluster has its own process numbers, its own list of users and its own /root; it ends with its standard input, and
everything in it ends with it. A node has its own process numbers again, its own host name and its own /run, as real
nodes have; its slurmd and its kinetod see the node's processes only. Standard library only.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, List, Mapping, NoReturn, Optional

_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_libc = ctypes.CDLL(None, use_errno=True)


def _mount(source: str, target: Path, kind: str = "", flags: int = 0, options: str = "") -> None:
    data = options.encode() or None
    if _libc.mount(source.encode(), str(target).encode(), kind.encode() or None, ctypes.c_ulong(flags), data) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(target))


def _let_everybody_in(place: Path, root: Path) -> None:
    """Folders above it that only root may enter are replaced by ones that have nothing but the way to it."""
    for above in reversed(place.parents):
        if above.stat().st_mode & 0o001:
            continue
        kept = root / f"kept{len(list(root.glob('kept*')))}"
        kept.mkdir()
        _mount(str(place), kept, flags=_MS_BIND | _MS_REC)
        _mount("tmpfs", above, "tmpfs", options="mode=0755")
        place.mkdir(parents=True)
        _mount(str(kept), place, flags=_MS_BIND | _MS_REC)


def _start(command: List[str], log: Path, environ: Optional[Mapping[str, str]] = None) -> None:
    with log.open("ab") as output:
        subprocess.Popen(
            command, env={**os.environ, **(environ or {})}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )


def _outlive() -> NoReturn:
    """Reaps orphans, as the first process of a PID namespace has to."""
    while True:
        try:
            os.wait()
        except ChildProcessError:
            threading.Event().wait(0.1)


def cluster(root: Path, told: Mapping[str, Any]) -> NoReturn:
    """Sets up the users, munge, the controller and the nodes."""
    _mount("none", Path("/"), flags=_MS_REC | _MS_PRIVATE)
    for name in ("passwd", "group"):
        _mount(str(root / name), Path("/etc", name), flags=_MS_BIND)
    for place in told["open"]:
        _let_everybody_in(Path(place), root)
    munge = [f"--{name}={root}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
    # returns once it listens
    subprocess.run(["munged", "--force", f"--key-file={root}/munge.key", *munge], check=True, stdin=subprocess.DEVNULL)
    _start(["slurmctld", "-D", "-c"], root / "slurmctld.out")
    for node in told["nodes"]:
        separate = ["unshare", "--fork", "--pid", "--mount-proc", "--uts", "--kill-child"]
        _start([*separate, sys.executable, "-S", __file__, "node", str(root), node], root / f"{node}.out")

    def end_with_the_input() -> None:
        sys.stdin.read()
        os._exit(0)  # the kernel ends the rest of the PID namespace

    threading.Thread(target=end_with_the_input, daemon=True).start()
    print("started", flush=True)
    _outlive()


def node(root: Path, told: Mapping[str, Any], name: str) -> NoReturn:
    """A daemon at the usual place for agents, and slurmd."""
    socket.sethostname(name)
    _mount("tmpfs", Path("/run"), "tmpfs", options="mode=0755")
    Path("/run/kineto").mkdir()
    folder = root / name
    listening = ["--listen", f"unix:{folder}/kinetod.sock", "--agent-socket", "/run/kineto/agent.sock"]
    daemon = [sys.executable, "-m", "kinetod", *listening, "--state-dir", f"{folder}/state", *told["daemon_options"]]
    _start(daemon, folder / "kinetod.log", told["daemon_environ"])
    _start(["slurmd", "-D", "-N", name], folder / "slurmd.out")
    _outlive()


if __name__ == "__main__":
    base = Path(sys.argv[2])
    config = json.loads((base / "cluster.json").read_text())
    if sys.argv[1] == "cluster":
        cluster(base, config)
    else:
        node(base, config, sys.argv[3])
