import pytest
from kineto_agent.control import link


@pytest.fixture
def soon_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents that have lost their daemon try again at once, not a second later."""
    monkeypatch.setattr(link, "FIRST_BACKOFF_NS", 20_000_000)
