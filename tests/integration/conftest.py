"""For the tests with a real daemon."""

from collections.abc import Iterator

import pytest
from support.daemon import Daemon, running_daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One for all tests of a module, with the usual settings."""
    with running_daemon() as started:
        yield started
