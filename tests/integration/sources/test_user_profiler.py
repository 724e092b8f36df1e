"""A training loop that runs torch.profiler all the time, and captures of it: the short form of a campaign."""

import pytest
from campaign.parts.profiler_stress import stress
from support.service.daemon import running_daemon

pytestmark = [pytest.mark.slow, pytest.mark.torch]


def test_own_traces_are_whole_and_every_capture_says_what_became_of_it() -> None:
    with running_daemon() as daemon:
        report = stress(daemon, "FAKE", 10)
    assert report.problems == []
    assert len(report.captures) == 10
