"""Runs kinetoctl for tests: in this process, or as a real one."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kinetoctl.__main__ import main

REPOSITORY = Path(__file__).parents[2]
IMPORT_PATH = os.pathsep.join(str(REPOSITORY / part) for part in ("agent", "daemon", "cli", "protos"))
DEADLINE_S = 60


@dataclass(frozen=True)
class Result:
    """What a run of kinetoctl left."""

    code: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        """Stdout, which must be one JSON value and nothing else."""
        return json.loads(self.stdout)


def run_here(capsys: pytest.CaptureFixture[str], address: str, *arguments: str) -> Result:
    """Run `kinetoctl --address ADDRESS ARGUMENTS...` in this process."""
    code = main(["--address", address, *arguments])
    captured = capsys.readouterr()
    return Result(code, captured.out, captured.err)


def kinetoctl(*arguments: str) -> list[str]:
    """The command line of a kinetoctl process."""
    return [sys.executable, "-m", "kinetoctl", *arguments]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment with the packages of the repository importable."""
    return {**os.environ, "PYTHONPATH": IMPORT_PATH, **changes}


def run_process(arguments: Sequence[str], environ: Mapping[str, str], cwd: Path | None = None) -> Result:
    """Run kinetoctl as a process of its own."""
    done = subprocess.run(
        kinetoctl(*arguments), env=dict(environ), cwd=cwd, capture_output=True, text=True, timeout=DEADLINE_S
    )
    return Result(done.returncode, done.stdout, done.stderr)
