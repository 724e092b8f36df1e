"""The helper process, or the daemon, may be killed at any moment of an attach: the target goes on, and can be attached
to again.
"""

import pytest
from campaign.parts.attach_harness import machine_library, table
from campaign.parts.attach_kills import kill_moments
from support.targets.attachers import HelperAttacher

pytestmark = pytest.mark.slow

MOMENTS = 20


@pytest.mark.parametrize("kind", ["malloc", "threads", "asleep_poll", "registers_bystander"])
def test_target_survives_the_death_of_the_helper_at_any_moment(kind: str, attacher: HelperAttacher) -> None:
    if kind == "registers_bystander" and machine_library() is None:
        pytest.skip("needs a C compiler and x86-64")
    row = kill_moments(kind, MOMENTS // 4)
    assert row.harmless and row.count("success") == 1, table([row])


def test_target_survives_the_death_of_the_daemon_at_any_moment(attacher: HelperAttacher) -> None:
    row = kill_moments("malloc", MOMENTS // 4, daemon=True)
    assert row.harmless and row.count("success") == 1, table([row])
