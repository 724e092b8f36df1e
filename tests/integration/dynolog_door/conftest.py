"""For the tests with real training processes."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.dynolog.door import door_of, open_door
from support.service.daemon import Daemon

PROGRAM = Path(__file__).parents[2] / "support" / "dynolog" / "torch_loop.py"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon with the door open, which may write traces where tests have their folders."""
    with open_door(log_roots=str(tmp_path_factory.getbasetemp())) as started:
        yield started


@pytest.fixture(scope="module")
def door(daemon: Daemon) -> str:
    """Where the module's daemon serves Dynolog's clients."""
    return door_of(daemon)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[int]:
    """The pid of a training process that nobody prepared."""
    command = [sys.executable, str(PROGRAM)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process.pid
        finally:
            process.kill()
