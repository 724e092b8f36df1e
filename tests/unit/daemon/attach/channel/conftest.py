"""Programs that nobody prepared, under the oldest, the newest and our own Python, or under all of this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.targets.live_target import PROGRAM, LiveTarget, Start, pythons
from support.targets.python_versions import OWN, other_versions_slow

EVERY = pythons()
FEW = [path for path in EVERY if path in (EVERY[0], EVERY[-1]) or OWN in path]


def name_of(path: str) -> str:
    """The version: pyenv has it in the folder's name, others in the file's."""
    return next(part for part in reversed(Path(path).parts) if "3." in part)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What is the same in all versions is not tested under those in between."""
    if "start" in metafunc.fixturenames:
        chosen = EVERY if metafunc.definition.get_closest_marker("every_python") else FEW
        metafunc.parametrize("start", other_versions_slow(chosen), ids=name_of, indirect=True)


@pytest.fixture
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
