"""For the tests of GPUs: the fake NVML in the environment, and a reader of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetod.gpus.gpu_reader import GpuReader
from support.machine.gpus import FakeGpus


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    """What the fake NVML shows to processes that are started now."""
    gpus = FakeGpus(tmp_path)
    for name, value in gpus.environ.items():
        monkeypatch.setenv(name, value)
    return gpus


@pytest.fixture
def reader(gpus: FakeGpus) -> Iterator[GpuReader]:
    """One that is closed at the end, whatever the fake does."""
    reader = GpuReader()
    yield reader
    gpus.say()
    reader.close()
