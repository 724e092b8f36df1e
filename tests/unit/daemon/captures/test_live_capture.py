import os
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.base.errors import InvalidRequest
from kinetod.captures.live_capture import NOBODY, OwnersKey, check_start, owner_of, whose_are_listed
from kinetod.config.settings import Config
from kinetod.permissions.role_policy import Role
from support.service.callers import caller

SECOND_NS = 10**9
NOW_NS = 1_800_000_000 * SECOND_NS
CONFIG = Config(listen=(), agent_socket=Path("/a"), state_dir=Path("/s"))


@pytest.mark.parametrize(
    ("uid", "roles", "owner", "listed"),
    [
        (1000, {Role.OWN}, 1000, 1000),
        (0, {Role.JOBS}, 0, 0),
        (1000, {Role.OWN, Role.VIEWER}, 1000, None),
        (None, {Role.ADMIN}, os.geteuid(), None),
        (None, {Role.PODS}, os.geteuid(), NOBODY),  # not those of the daemon's user
    ],
)
def test_a_caller_owns_and_lists_captures_by_uid(
    uid: int | None, roles: set[Role], owner: int, listed: int | None
) -> None:
    who = caller(uid, roles)
    assert (owner_of(who), whose_are_listed(who)) == (owner, listed)


def test_two_owners_may_use_the_same_key() -> None:
    assert [OwnersKey("k", 1).stored, OwnersKey("k", 2).stored, OwnersKey("", 1).stored] == ["1:k", "2:k", ""]


def refused_field(*, by_iteration: bool = False, options: pb.Options | None = None, **start: Any) -> str | None:
    """The field for which a start of these values is refused; None: it is accepted."""
    extent: Any = {"iterations": pb.IterationWindow(count=1)} if by_iteration else {"duration_ns": SECOND_NS}
    capture = pb.Capture(id="c1", spec=pb.CaptureSpec(arm_ns=SECOND_NS, options=options, **extent))
    capture.targets.add(pid=7)
    capture.targets.add(pid=8)
    try:
        check_start(pb.StartCaptureRequest(id="c1", **start), capture, CONFIG, NOW_NS)
    except InvalidRequest as exc:
        return exc.metadata["field"]
    return None


def test_a_start_that_makes_sense_is_accepted() -> None:
    clock = pb.ClockOffset(offset_ns=-(10**18), uncertainty_ns=5)
    assert refused_field() is None
    assert refused_field(start_time_ns=NOW_NS + SECOND_NS, clock=clock) is None
    assert refused_field(by_iteration=True) is None
    assert refused_field(by_iteration=True, iterations=[pb.IterationStart(pid=8, start=12, warmup=2)]) is None


@pytest.mark.parametrize(
    ("start", "field"),
    [
        ({"start_time_ns": NOW_NS - 60 * SECOND_NS}, "start_time_ns"),
        ({"start_time_ns": NOW_NS + 3600 * SECOND_NS}, "start_time_ns"),
        ({"start_time_ns": NOW_NS, "by_iteration": True}, "start_time_ns"),
        ({"start_time_ns": NOW_NS, "options": pb.Options(wait_for_user_profiler=True)}, "start_time_ns"),
        ({"iterations": [pb.IterationStart(pid=7)]}, "iterations"),
        ({"iterations": [pb.IterationStart(pid=9)], "by_iteration": True}, "iterations[0].pid"),
        ({"iterations": [pb.IterationStart(pid=7)] * 2, "by_iteration": True}, "iterations[1].pid"),
        ({"iterations": [pb.IterationStart(pid=7, start=-1)], "by_iteration": True}, "iterations[0].start"),
        ({"iterations": [pb.IterationStart(pid=7, start=2**60)], "by_iteration": True}, "iterations[0].start"),
        ({"iterations": [pb.IterationStart(pid=7, warmup=-1)], "by_iteration": True}, "iterations[0].warmup"),
        ({"clock": pb.ClockOffset(offset_ns=1 << 62)}, "clock.offset_ns"),
        ({"clock": pb.ClockOffset(uncertainty_ns=-1)}, "clock.uncertainty_ns"),
    ],
)
def test_a_wrong_field_is_named(start: dict[str, Any], field: str) -> None:
    assert refused_field(**start) == field
