from collections.abc import Iterator

import pytest
from support.counters.fake_intel_metrics import IntelSampler, running_sampler


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[IntelSampler]:
    """A kinetod-counters that serves the fake's GPUs, for all tests of a module."""
    with running_sampler(tmp_path_factory.mktemp("intel")) as started:
        yield started


@pytest.fixture
def sampler(running: IntelSampler) -> Iterator[IntelSampler]:
    """The same, whose plan and log begin anew; no call was wrong in the end."""
    running.fake.play()
    running.fake.forget()
    yield running
    assert running.fake.wrong() == []
