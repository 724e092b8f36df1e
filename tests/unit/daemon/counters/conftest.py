from collections.abc import Iterator
from pathlib import Path

import pytest
from support.counters.fake_pm_sampling import FakePmSampling, environment


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakePmSampling]:
    """A host with the fake libraries, for this process and its children."""
    folder = tmp_path / "driver"
    folder.mkdir()
    made = FakePmSampling(folder)
    with environment(made.environ):
        yield made
