from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetod.counters import counter_client, sampler_server
from support.counters.fake_pm_sampling import FakePmSampling, environment
from support.waiting import scaled


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that is late is not a driver that hangs; a test that is about one has its own deadlines."""
    monkeypatch.setattr(counter_client, "STOP_S", scaled(30))
    monkeypatch.setattr(sampler_server, "STOP_S", scaled(20))


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakePmSampling]:
    """A host with the fake libraries, for this process and its children."""
    folder = tmp_path / "driver"
    folder.mkdir()
    made = FakePmSampling(folder)
    with environment(made.environ):
        yield made
