"""Programs that nobody prepared, under every Python of this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.targets.live_target import PROGRAM, LiveTarget, Start, pythons
from support.targets.python_versions import other_versions_slow


def name_of(path: str) -> str:
    """The version: pyenv has it in the folder's name, others in the file's."""
    return next(part for part in reversed(Path(path).parts) if "3." in part)


@pytest.fixture(params=other_versions_slow(pythons()), ids=name_of)
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    targets: list[LiveTarget] = []

    def start_one(*options: str, program: str = PROGRAM) -> LiveTarget:
        targets.append(LiveTarget(request.param, *options, program=program))
        return targets[-1]

    yield start_one
    for target in targets:
        target.kill()


@pytest.fixture
def target(start: Start) -> LiveTarget:
    target = start()
    target.do("import os, sys")
    return target
