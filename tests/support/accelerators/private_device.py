"""A program on a made-up accelerator outside of torch (tests/fakes/private_device.cpp), and that accelerator's library.

    python private_device.py LIBRARY

Works until its standard input ends. Commands on it, each answered with one line of JSON:

    log             what the device has executed: [[name, correlation, thread, start, end, launch in Unix ns]]
    profile PATH    begins the program's own torch.profiler, which goes on until the next command: []
    end             ends it; kernels in its exported trace, and those that the program launched: {"traced", "launched"}
    longest         the longest step since the last time this was asked, in ns: {"ns"}
"""

import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

NAME = "acme"
KERNEL, COPY, FILL = "acme_gemm<float, 128>", "Memcpy HtoD (Host -> Acme)", "Memset (Acme)"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
BUSY_NS = 20_000
_NAME_BYTES = 128


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX") or "g++")


def library() -> Path:
    """The accelerator's library, built against the installed torch; the same input is compiled once."""
    import torch

    from support.machine.native import CACHE, FAKES

    folder, found = Path(torch.__file__).parent, compiler()
    assert found is not None
    source = FAKES / "private_device.cpp"
    command = [
        found, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-DUSE_KINETO", "-DFMT_HEADER_ONLY=1",
        *(f"-I{folder / 'include' / part}" for part in ("", "torch/csrc/api/include", "kineto")),
        str(source), f"-L{folder / 'lib'}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    state = hashlib.sha256("\0".join([*command, torch.__version__, source.read_text()]).encode()).hexdigest()
    target = CACHE / state[:20] / "libacme.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f"{target.name}.{os.getpid()}")
        subprocess.run([*command, "-o", str(scratch)], check=True)
        scratch.replace(target)
    return target


class Accelerator:
    """The device, registered with torch under its name, and an operator on it."""

    def __init__(self, path: str) -> None:
        import torch

        self.torch: Any = torch
        self.device = ctypes.CDLL(path)
        self.device.acme_launch.argtypes = (ctypes.c_char_p, ctypes.c_int64)
        self.device.acme_copy.argtypes = self.device.acme_fill.argtypes = (ctypes.c_int64,)
        self.device.acme_executed.argtypes = (
            ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int64 * 5,
        )  # fmt: skip
        torch.utils.rename_privateuse1_backend(NAME)
        self.device.acme_register_profiler()
        self._operators = torch.library.Library(NAME, "DEF")
        self._operators.define("gemm(Tensor a) -> Tensor")
        self._operators.impl("gemm", self._gemm, "CPU")
        self.matrix = torch.ones(4, 4)

    def _gemm(self, a: Any) -> Any:
        self.device.acme_launch(KERNEL.encode(), BUSY_NS)
        return a + 1

    def step(self) -> None:
        """Work on the device and on the host; it is done when this returns."""
        self.device.acme_copy(1 << 20)
        self.torch.ops.acme.gemm(self.matrix)
        self.device.acme_fill(4096)
        self.device.acme_synchronize()

    def log(self) -> list[list[Any]]:
        """What the device has executed, from the first on."""
        found: list[list[Any]] = []
        name, numbers = ctypes.create_string_buffer(_NAME_BYTES), (ctypes.c_int64 * 5)()
        while self.device.acme_executed(len(found), name, _NAME_BYTES, numbers):
            found.append([name.value.decode(), *numbers])
        return found

    def begin(self, path: str) -> None:
        """Begins the program's own torch.profiler."""
        activities = self.torch.profiler.supported_activities()
        self._own, self._path = self.torch.profiler.profile(activities=activities), path
        self._before = self.device.acme_launched()
        self._own.start()

    def end(self) -> dict[str, int]:
        """Ends it. The kernels in its trace, and those that were launched meanwhile."""
        launched = self.device.acme_launched() - self._before
        self._own.stop()
        self._own.export_chrome_trace(self._path)
        events = json.loads(Path(self._path).read_text())["traceEvents"]
        return {"traced": sum(event.get("cat") in ON_DEVICE for event in events), "launched": launched}


def main() -> None:
    """Steps until standard input ends."""
    accelerator = Accelerator(sys.argv[1])
    commands: list[list[str]] = []
    ended = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            commands.append(line.split())
        ended.set()

    threading.Thread(target=listen, daemon=True).start()
    print("ready", flush=True)
    longest_ns = 0
    while not ended.is_set():
        began_ns = time.monotonic_ns()
        accelerator.step()
        time.sleep(0.0005)
        longest_ns = max(longest_ns, time.monotonic_ns() - began_ns)
        if commands:
            command, *words = commands.pop(0)
            answer: object = accelerator.log() if command == "log" else []
            if command == "profile":
                accelerator.begin(words[0])
            elif command == "end":
                answer = accelerator.end()
            elif command == "longest":
                answer, longest_ns = {"ns": longest_ns}, 0
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
