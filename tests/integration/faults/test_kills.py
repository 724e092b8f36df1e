"""kill -9 at random moments of captures under load; `make campaign-faults` has hundreds of them."""

import random
from collections.abc import Iterator

import pytest
from campaign.parts.faults import Site, site
from campaign.parts.faults_kills import KILLS, kill

pytestmark = pytest.mark.slow

MOMENTS = 2


@pytest.fixture(scope="module")
def host() -> Iterator[Site]:
    with site(agents=2) as running:
        yield running


@pytest.mark.parametrize("victim", KILLS)
def test_after_a_kill_everything_is_served_and_told_truly(host: Site, victim: str) -> None:
    chance = random.Random()
    KILLS[victim](host, chance)
    host.forget()
    host.note_before()
    for _ in range(MOMENTS):
        KILLS[victim](host, chance)
        host.forget()
    host.note_after()
    print(f"{victim}: {host.tally}")


def test_figures_are_taken_once_the_daemon_has_replaced_a_worker_that_was_killed_while_idle(host: Site) -> None:
    host.note_before()
    before = host.tally.before
    kill(*host.children("kinetod.captures.result.decode_worker"))
    host.note_before()
    assert before is not None and host.tally.before is not None
    assert host.tally.before.children == before.children
