"""tests/rocm/hip_program.py on the fake ROCm, as a process to trace and to talk to."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.rocm import fakes as rocm

PROGRAM = Path(__file__).parents[2] / "rocm" / "hip_program.py"


class RocmProgram:
    """A running program. `order` gives its answer to one line."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.pid = process.pid
        self.ready = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def order(self, line: str) -> Any:
        """Send a line and wait for the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self) -> int:
        """End the program; gives its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait()


def fake_environment(folder: Path, **faults: int) -> dict[str, str]:
    """Variables with which a process finds the fakes in `folder`, which behave as these faults say."""
    node = folder / "kfd"
    node.touch()
    settings = ",".join(f"{key}={value}" for key, value in faults.items())
    library = next(folder.glob("librocprofiler-sdk.so*"))
    return {
        "KINETO_ROCPROFILER_LIBRARY": str(library),
        "KINETO_FAKE_KFD": str(node),
        "KINETO_FAKE_ROCPROFILER": settings,
    }


@contextmanager
def rocm_program(
    folder: Path,
    environ: Mapping[str, str],
    *arguments: str,
    prefix: Sequence[str] = (),
    bare: bool = False,
    **faults: int,
) -> Iterator[RocmProgram]:
    """Run the program with the fakes in `folder`; killed at the end. prefix: a command that runs it."""
    rocm.installed(folder, bare=bare)
    command = [*prefix, sys.executable, str(PROGRAM), "--hip", str(folder / "libamdhip64.so.7"), "--fake", *arguments]
    with subprocess.Popen(
        command,
        env={**environ, **fake_environment(folder, **faults)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield RocmProgram(process)
        finally:
            process.kill()
