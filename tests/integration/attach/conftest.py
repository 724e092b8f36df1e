"""A warm helper for the tests of a module; they are skipped where nothing may be traced."""

from collections.abc import Iterator

import pytest
from campaign.parts.attach_harness import RunningTarget
from support.targets.attachers import HelperAttacher


@pytest.fixture(scope="module")
def attacher() -> Iterator[HelperAttacher]:
    made = HelperAttacher()
    try:
        with RunningTarget("python") as target:
            target.wait_ready()
            attempt = made.attach(target.pid)
        if attempt.reason.startswith(("ATTACH_NOT_PERMITTED", "ATTACH_UNSUPPORTED")):
            pytest.skip(attempt.reason)
        yield made
    finally:
        made.close()
