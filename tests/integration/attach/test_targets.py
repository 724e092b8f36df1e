"""A few attaches to each kind of target, which all go on as if nothing had been. The campaign makes hundreds."""

from importlib.util import find_spec

import pytest
from campaign.parts.attach_harness import campaign, edges, machine_library, table
from support.targets.attachers import HelperAttacher

pytestmark = pytest.mark.slow

KINDS = {
    "python": 5,
    "malloc": 5,
    "threads": 5,
    "joined": 3,
    "gil_held_bystander": 2,
    "gil_free": 2,
    "gives_briefly": 4,
    "asleep": 5,
    "asleep_raw": 5,
    "for_good_sleep": 2,
    "for_good_acquire": 2,
    "for_good_recv": 2,
    "for_good_epoll": 2,
    "forking": 5,
    "workers": 5,
    "identity": 3,
    "timers": 4,
    "signals": 4,
    "profile": 3,
    "trace": 3,
    "monitoring": 3,
    "cprofile": 3,
    "at_the_limit": 3,
    "subinterpreters": 3,
    "replaced": 3,
    "shadowed": 3,
}
# The program does not let us in, or takes from us what we need; it must go on as it was. What is told then.
UNWILLING = {
    "veto_compile": "the program allows no compile",
    "veto_exec": "the program allows no exec",
    "veto_import": "the program allows no",
    "closing": "",
    "closing_often": "",
    "little_memory": "",
}
MANY = {"closing_often": 80}  # one in twenty lost a descriptor of its own when Python's functions made ours
REGISTERS = ("registers", "registers_bystander")


def no_harm_and_all_succeed(kind: str, attacher: HelperAttacher, count: int) -> None:
    row = campaign(kind, attacher, count)
    assert row.harmless and row.count("success") == count and not row.left, table([row])


@pytest.mark.parametrize("kind", KINDS)
def test_target_gets_the_agent_and_finds_nothing_changed(kind: str, attacher: HelperAttacher) -> None:
    no_harm_and_all_succeed(kind, attacher, KINDS[kind])


@pytest.mark.parametrize("kind", REGISTERS)
def test_registers_are_as_before(kind: str, attacher: HelperAttacher) -> None:
    if machine_library() is None:
        pytest.skip("needs a C compiler and x86-64")
    no_harm_and_all_succeed(kind, attacher, 4)


@pytest.mark.parametrize("kind", UNWILLING)
def test_target_that_does_not_let_the_agent_in_goes_on_and_the_reason_is_told(
    kind: str, attacher: HelperAttacher
) -> None:
    row = campaign(kind, attacher, MANY.get(kind, 3))
    assert row.untouched, table([row])
    assert all(UNWILLING[kind] in attempt.reason for attempt in row.attempts), table([row])


@pytest.mark.parametrize("kind", ["eventlet", "gevent"])
def test_green_threads_go_on(kind: str, attacher: HelperAttacher) -> None:
    if find_spec(kind) is None:  # not imported here: eventlet makes every fork of this process warn
        pytest.skip(f"no {kind}")
    no_harm_and_all_succeed(kind, attacher, 4)


@pytest.mark.torch
def test_data_loader_loses_nothing(attacher: HelperAttacher) -> None:
    no_harm_and_all_succeed("data_loader", attacher, 3)


@pytest.mark.parametrize("when", ["at_start", "at_exit"])
def test_process_that_starts_or_ends_is_not_harmed(when: str, attacher: HelperAttacher) -> None:
    row = edges(when, attacher, 5, most_s=0.08)
    assert row.harmless, table([row])
