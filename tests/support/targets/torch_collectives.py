"""A library that says of collectives what a process group of the installed PyTorch says of them."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

from support.machine.native import CACHE, FAKES

SOURCE = FAKES / "collectives.cpp"


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX") or "g++")


def library() -> Path:
    """The compiled library; the same input is compiled once."""
    folder = Path(torch.__file__).parent
    found = compiler()
    assert found is not None
    command = [
        found, "-std=c++20", "-O1", "-w", "-shared", "-fPIC", f"-I{folder / 'include'}",
        f"-I{folder / 'include' / 'torch' / 'csrc' / 'api' / 'include'}", str(SOURCE),
        f"-L{folder / 'lib'}", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    state = hashlib.sha256("\0".join([*command, torch.__version__, SOURCE.read_text()]).encode()).hexdigest()
    target = CACHE / state[:20] / "libcollectives.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = target.with_name(f"{target.name}.{os.getpid()}")
        subprocess.run([*command, "-o", str(scratch)], check=True)
        scratch.replace(target)
    return target
