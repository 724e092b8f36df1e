"""Attaching does not change what is computed."""

import pytest
from campaign.attach_targets.control import LAPS
from campaign.parts.attach_harness import RunningTarget
from support.targets.attachers import HelperAttacher
from support.waiting import scaled, until

ATTACHES = 20
LAPS_BETWEEN = 5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
]  # the second run takes as long as the first


def test_weights_of_a_run_with_20_attaches_are_those_of_an_undisturbed_one(attacher: HelperAttacher) -> None:
    with RunningTarget("torch") as disturbed:
        disturbed.wait_ready()
        for _ in range(ATTACHES):
            attempt = attacher.attach(disturbed.pid)
            assert attempt.outcome == "success", attempt
            laps = disturbed.words[LAPS]
            until(lambda since=laps: disturbed.words[LAPS] >= since + LAPS_BETWEEN, "training goes on")  # type: ignore[misc]
        assert disturbed.finish() == []
        laps = disturbed.words[LAPS]
    with RunningTarget("torch", laps=laps) as undisturbed:
        undisturbed.process.wait(scaled(150))
        assert undisturbed.report() == []
        assert undisturbed.words[LAPS] == laps
    assert disturbed.result == undisturbed.result
