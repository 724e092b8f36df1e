"""A host with NVIDIA GPUs: the fake libnvidia-ml.so.1 (tests/fakes/fake_nvml.c) and the file that steers it.

For tests on real ones: `torch_with_driver`.
"""

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

from support.machine.native import FAKES, build

NAME = "libnvidia-ml.so.1"


def fake_nvml() -> Path:
    """The library, under the name that the driver installs."""
    return build(NAME, [FAKES / "fake_nvml.c"], ["-O2", "-fPIC", "-shared", f"-Wl,-soname,{NAME}"])


def torch_with_driver() -> Any:
    """torch, for a module of tests on real GPUs; skips that without NVIDIA's driver, and without importing torch."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
    return pytest.importorskip("torch")


class FakeGpus:
    """What the GPUs of the processes with `environ` do. The keys are at the top of fake_nvml.c."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "fake-nvml"
        self.path.write_text("")
        inherited = os.environ.get("LD_LIBRARY_PATH")
        self.environ = {
            "FAKE_NVML": str(self.path),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(fake_nvml().parent), inherited])),
        }

    def gpm_calls(self) -> list[str]:
        """What was done to GPM's buffers: "alloc" and "free", and each call that was out of order."""
        path = self.path.with_suffix(".gpm")
        return path.read_text().splitlines() if path.exists() else []

    def say(self, *lines: str) -> None:
        """Replaces what the file says, in one step."""
        scratch = self.path.with_suffix(".new")
        scratch.write_text("".join(f"{line}\n" for line in lines))
        scratch.replace(self.path)
