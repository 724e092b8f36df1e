"""Servers that are told to stop in hundreds of tests do so at once."""

import pytest
from kinetoctl.web.http import web_server
from kinetoctl.web.shared import doors


@pytest.fixture(autouse=True)
def stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "_LOOK_S", 0.01)
    monkeypatch.setattr(doors, "_LOOK_S", 0.01)
