"""Servers that are told to stop in hundreds of tests do so at once; what a file's `browser` shows has its ids."""

import re

import pytest
from kinetoctl.web.http import request_handler
from support.web.browsing import Browser


@pytest.fixture(autouse=True)
def stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_handler, "_LOOK_S", 0.01)


@pytest.fixture(scope="module")
def ids(browser: Browser) -> list[str]:
    """In the order in which the traces were named."""
    return re.findall(r'href="/c/(\w+)"', browser.ask("/").text)
