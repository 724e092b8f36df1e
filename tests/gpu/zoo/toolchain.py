"""Makes the programs of native/ with nvcc."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections import defaultdict
from pathlib import Path

from gpu.zoo.life import Skip

NATIVE = Path(__file__).with_name("native")
CUDA = Path("/usr/local/cuda")
OPTIONS = ("-O2", "-std=c++17", "-arch=sm_90", f"-L{CUDA}/lib64/stubs")
# What single programs need besides: device-side launches, the driver API, dlopen.
EXTRA = {
    **dict.fromkeys(("graphs", "device_graphs"), ("-rdc=true", "-lcudadevrt")),
    "process": ("-lcuda",),
    "cupti_user": ("-ldl",),
}


def find_nvcc() -> str | None:
    """nvcc on the PATH, or where CUDA is installed."""
    return shutil.which("nvcc") or shutil.which(str(CUDA / "bin" / "nvcc"))


class Toolchain:
    """Programs made once each, in a folder; may be used by several threads."""

    def __init__(self, folder: Path, nvcc: str | None = None) -> None:
        self.folder, self.nvcc = folder, nvcc or find_nvcc()
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._made: dict[str, Path] = {}
        self._failed: dict[str, str] = {}

    def program(self, source: str) -> Path:
        """The executable made from native/SOURCE.cu. Raises Skip with the compiler's words."""
        with self._locks[source]:
            if source in self._failed:
                raise Skip(self._failed[source])
            if source not in self._made:
                self._make(source)
            return self._made[source]

    def _make(self, source: str) -> None:
        if self.nvcc is None:
            self._failed[source] = "there is no nvcc"
            raise Skip(self._failed[source])
        target = self.folder / source
        command = [self.nvcc, *OPTIONS, "-o", str(target), str(NATIVE / f"{source}.cu"), *EXTRA.get(source, ())]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode != 0:
            words = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            self._failed[source] = f"nvcc {source}.cu: {words[0] if words else done.returncode}"
            raise Skip(self._failed[source])
        self._made[source] = target
