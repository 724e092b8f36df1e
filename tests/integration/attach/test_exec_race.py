"""A process that becomes another user's at each step of a trace; `make campaign-exec-race` is the long form."""

import os
from collections.abc import Iterator

import pytest
from campaign.parts.exec_race import ADA, BOB, ROOT_DAEMON, WITH_HELPER, Race
from support.service.stepped import DAEMON_STEPS, HELPER_STEPS, SERVICE_STEPS
from support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="users are played by root")]
BY_THEMSELVES = ("looked", "introduced", "decided", "made", "collecting", "collected", "storing")
REFUSALS = {"ATTACH_REPLACED", "NOT_YOUR_PROCESS", "NO_AGENT"}  # of the request; after it, the capture's verdict
KEPT = {"storing"}  # all had been recorded and decided about before


@pytest.fixture(scope="module", params=[ROOT_DAEMON, WITH_HELPER])
def race(request: pytest.FixtureRequest) -> Iterator[Race]:
    with Race(request.param, steps=True) as started:
        yield started


@pytest.mark.parametrize("step", [*DAEMON_STEPS, *SERVICE_STEPS, *HELPER_STEPS])
def test_a_process_that_becomes_another_users_is_left_alone(race: Race, step: str) -> None:
    if step not in race.steps_of:
        pytest.skip("a step of the other deployment")
    outcome = race.attempt(step, uid=0 if step in HELPER_STEPS else BOB)
    assert outcome.reached and outcome.changed, outcome
    assert not outcome.wrong, outcome
    assert outcome.result in (REFUSALS | {"TARGET_REPLACED"} | ({"DONE"} if step in KEPT else set())), outcome
    if outcome.result in REFUSALS - {"NO_AGENT"}:
        assert refusal(race, outcome.pid)["target_uid"] in (ADA, BOB, 0)


@pytest.mark.parametrize("step", BY_THEMSELVES)
def test_nor_is_one_whose_agents_connect_by_themselves(race: Race, step: str) -> None:
    outcome = race.attempt(step, agent=True)
    assert outcome.reached and outcome.changed, outcome
    assert not outcome.wrong, outcome
    assert outcome.result in (REFUSALS | {"TARGET_REPLACED"} | ({"DONE"} if step in KEPT else set())), outcome


def refusal(race: Race, pid: int) -> dict[str, object]:
    """The line of the audit log about the request."""

    def written() -> list[dict[str, object]]:
        return [line for line in race.audited() if line.get("selector") == {"pids": [pid]}]

    (line,) = until(written, "the log has the request")
    return line


def test_the_audit_log_names_whose_the_process_was_when_it_was_refused(race: Race) -> None:
    line = refusal(race, race.attempt("introduced", agent=True).pid)
    assert (line["decision"], line["reason"], line["target_uid"]) == ("denied", "NOT_YOUR_PROCESS", BOB)


def test_a_process_that_stays_what_it_is_is_traced(race: Race) -> None:
    assert race.attempt(delay_s=60).result == "DONE"
