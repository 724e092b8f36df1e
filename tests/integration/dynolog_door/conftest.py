"""For the tests with real training processes."""

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.dynolog.door import door_of, open_door, open_folder
from support.service.daemon import Daemon

PROGRAM = Path(__file__).parents[2] / "support" / "dynolog" / "torch_loop.py"


@pytest.fixture(scope="module")
def logs() -> Iterator[Path]:
    """A folder for traces that every user may enter, which pytest's are not."""
    with open_folder() as made:
        yield made


@pytest.fixture
def place(logs: Path) -> Path:
    """A folder in it for one test."""
    made = Path(tempfile.mkdtemp(dir=logs))
    made.chmod(0o755)
    return made


@pytest.fixture(scope="module")
def daemon(logs: Path) -> Iterator[Daemon]:
    """A daemon with the door open, which may write traces below the folder."""
    with open_door(log_roots=str(logs)) as started:
        yield started


@pytest.fixture(scope="module")
def door(daemon: Daemon) -> str:
    """Where the module's daemon serves Dynolog's clients."""
    return door_of(daemon)


@pytest.fixture
def training(place: Path) -> Iterator[int]:
    """The pid of a training process that nobody prepared."""
    command = [sys.executable, str(PROGRAM)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=place, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()
