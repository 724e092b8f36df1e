"""A throw-away copy of this machine with systemd as its first process: an overlay, booted by systemd-nspawn."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from support.waiting import until

BOOT_S = 90.0
WAITS_FOR_A_NETWORK = ("systemd-networkd-wait-online", "NetworkManager-wait-online", "ifupdown-wait-online")
SIZE = "6g"  # of what may be written in it
# Running kinetod inside: it must see no other filter than its own, as on a host.
ENVIRON = {**os.environ, "SYSTEMD_SECCOMP": "0"}


class CannotBoot(Exception):
    """There is no systemd to be had here. The text says why."""


class Machine:
    """The copy of this machine, booted."""

    def __init__(self, first: int, root: Path) -> None:
        self.first = first  # its process 1, as we see it
        self.root = root

    def run(self, *command: str, check: bool = True, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
        """A command inside, as root."""
        inside = ["nsenter", "--target", str(self.first), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup"]
        environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/", "LANG": "C.UTF-8"}
        done = subprocess.run(
            [*inside, "--root", "--wd=/", "--", *command],
            env=environ,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def said(self, *command: str) -> str:
        """Runs a command. Returns its standard output."""
        return self.run(*command, check=False).stdout.strip()

    def show(self, unit: str, name: str) -> str:
        """Value of a property of a unit."""
        return self.said("systemctl", "show", "--value", "--property", name, unit)


def _no(why: str) -> NoReturn:
    raise CannotBoot(why)


@contextlib.contextmanager
def machine() -> Iterator[Machine]:
    """Boots a copy of this machine. Raises CannotBoot."""
    if os.geteuid() != 0:
        _no("needs root")
    for program in ("systemd-nspawn", "nsenter"):
        if shutil.which(program) is None:
            _no(f"there is no {program} (apt-get install systemd-container util-linux)")
    folder = Path(tempfile.mkdtemp(prefix="kinetod-machine-", dir="/var/tmp"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for name in ("layer", "root"):
            (folder / name).mkdir()
        _mount(stack, folder / "layer", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs")
        for name in ("upper", "work"):
            (folder / "layer" / name).mkdir()
        layers = f"lowerdir=/,upperdir={folder}/layer/upper,workdir={folder}/layer/work"
        _mount(stack, folder / "root", "-t", "overlay", "-o", layers, "overlay")
        (folder / "root/etc/machine-id").unlink(missing_ok=True)
        log = (folder / "log").open("wb")
        stack.enter_context(log)
        process = subprocess.Popen(
            [
                "systemd-nspawn", "--directory", str(folder / "root"), "--boot", "--console=pipe", "--register=no",
                "--keep-unit", "--private-network", "--capability=all", "systemd.unit=multi-user.target",
                "systemd.mask=systemd-resolved.service", "systemd.mask=networking.service",
                *(f"systemd.mask={name}.service" for name in WAITS_FOR_A_NETWORK),
            ],
            env=ENVIRON, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
        stack.callback(_end, process)
        yield _booted(process, folder)


def _booted(process: "subprocess.Popen[bytes]", folder: Path) -> Machine:
    def first() -> int:
        if process.poll() is not None:
            _no(f"systemd-nspawn ended: {(folder / 'log').read_text(errors='replace')[-2000:]}")
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0].endswith(b"systemd"):
                    return int(child)
        return 0

    try:
        found = Machine(until(first, "systemd is started", BOOT_S), folder / "root")
        until(
            lambda: found.said("systemctl", "is-system-running") in ("running", "degraded"),
            "systemd has booted",
            BOOT_S,
            state=lambda: found.said("systemctl", "list-jobs"),
        )
    except AssertionError as exc:
        raise CannotBoot(str(exc)) from exc
    return found


def _mount(stack: contextlib.ExitStack, where: Path, *arguments: str) -> None:
    done = subprocess.run(["mount", *arguments, str(where)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        _no(f"mount {' '.join(arguments)}: {done.stderr.strip()}")
    stack.callback(subprocess.run, ["umount", "--lazy", str(where)], check=False)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """It halts on SIGTERM; the second one ends it at once."""
    for _ in range(2):
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
            return
    process.kill()
    process.wait()
