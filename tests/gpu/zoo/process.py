"""One running program of the zoo, seen from the runner: its start, what its folder says, its end."""

from __future__ import annotations

import array
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu.zoo.catalog import Program
from gpu.zoo.life import SKIPPED, Skip
from gpu.zoo.toolchain import Toolchain

CHILD = Path(__file__).with_name("child.py")
POLL_S = 0.05
END_S = 60  # a program that has not ended so long after it was told to hangs
NOT_INHERITED = ("PYTHONPATH", "KINETO_AGENT", "KINETO_AGENT_SOCKET", "KINETO_ADDRESS")
# So that the same program computes the same bits in every process.
DETERMINISM = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONHASHSEED": "0", "TOKENIZERS_PARALLELISM": "false"}
# Many of them compile at the same time.
FEW_THREADS = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}
STDERR_TAIL = 2000


class Ended(Exception):
    """The program has ended although nobody asked it to."""


def environment(program: Program, folder: Path) -> dict[str, str]:
    """What a plainly started program has: nothing of ours, and caches that no other program shares."""
    kept = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUPY_CACHE_DIR": "cupy"}
    own = {name: str(folder / part) for name, part in caches.items()}
    return {**kept, **DETERMINISM, **FEW_THREADS, **own, "HF_HUB_OFFLINE": "1", **program.environ}


def command_of(program: Program, folder: Path, toolchain: Toolchain, device: str, most_s: float) -> list[str]:
    """The command line. Raises Skip if a tool is missing."""
    if program.prefix and shutil.which(program.prefix[0]) is None:
        raise Skip(f"there is no {program.prefix[0]}")
    if program.run is None:
        if device != "cuda":
            raise Skip("needs a GPU")
        return [*program.prefix, str(toolchain.program(program.source)), *program.arguments, str(folder)]
    options = ("--device", device, "--most-s", str(most_s))
    return [*program.prefix, sys.executable, str(CHILD), program.name, str(folder), *options]


class Running:
    """A started program. Its folder is its own."""

    def __init__(self, program: Program, folder: Path, toolchain: Toolchain, device: str, most_s: float) -> None:
        folder.mkdir(parents=True)
        self.program, self.folder = program, folder
        command = command_of(program, folder, toolchain, device, most_s)
        with (folder / "stdout").open("wb") as output, (folder / "stderr").open("wb") as errors:
            self.process = subprocess.Popen(
                command, env=environment(program, folder), stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
                cwd=folder, start_new_session=True,
            )  # fmt: skip
        self.asked_to_end = False

    def events(self, name: str) -> list[dict[str, Any]]:
        """All events of that name so far."""
        path = self.folder / "events"
        lines = path.read_text().splitlines() if path.exists() else []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):  # the last line may be half of one
                found.append(json.loads(line))
        return [event for event in found if event["event"] == name]

    def times(self) -> array.array[int]:
        """Unix time in ns of the end of every iteration."""
        found = array.array("q")
        path = self.folder / "times"
        if path.exists():
            data = path.read_bytes()
            found.frombytes(data[: len(data) // 8 * 8])
        return found

    def alive(self) -> bool:
        """Whether it runs."""
        return self.process.poll() is None

    def await_ready(self, deadline: float) -> list[int]:
        """The pids to trace. Raises Skip, Ended, or TimeoutError."""
        while True:
            over = not self.alive()  # asked before the events are read: the last of them count
            if ready := self.events("ready"):
                return [int(pid) for pid in ready[0]["pids"]]
            if over:
                if self.process.returncode == SKIPPED:
                    raise Skip(str(self.events("skip")[0]["reason"]))
                raise Ended
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(POLL_S)

    def ask_to_end(self) -> None:
        """By the file, or by SIGTERM to the process that said that it is ready."""
        self.asked_to_end = True
        if self.program.end == "term" and self.alive():
            self.process.send_signal(signal.SIGTERM)
        else:
            (self.folder / "end").touch()

    def await_end(self, timeout_s: float = END_S) -> int | None:
        """The exit status; None: it hangs, and was killed."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self) -> None:
        """It and the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stderr_tail(self) -> str:
        """The last of its standard error."""
        return (self.folder / "stderr").read_text(errors="replace")[-STDERR_TAIL:]

    def digests(self) -> dict[int, str]:
        """By iteration."""
        return {int(event["iteration"]): str(event["value"]) for event in self.events("digest")}


def resident_bytes(pid: int) -> int:
    """Resident memory; 0: the process is gone."""
    with contextlib.suppress(OSError, ValueError):
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    return 0


def gpu_bytes(pid: int) -> int:
    """GPU memory by nvidia-smi; 0: unknown."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
        rows = [line.split(",") for line in done.stdout.splitlines()]
        return sum(int(used) << 20 for found, used in rows if int(found) == pid)
    return 0
