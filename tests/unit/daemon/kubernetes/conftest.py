from collections.abc import Iterator
from pathlib import Path

import pytest
from support.peers.api_server import ApiServer, api_server


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ApiServer]:
    with api_server(tmp_path / "cluster") as server:
        yield server
