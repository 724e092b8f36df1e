"""The doorkeeper: how many calls are under way for whom, who is paused, and what is written of that."""

import asyncio
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from kinetod.access.audit_log import AuditLog
from kinetod.access.call_gate import PENALTY_S, CallTracker
from kinetod.access.callers import Callers, CallerStatus
from kinetod.base import metrics
from kinetod.base.errors import Exhausted, NotPermitted, Reason
from kinetod.base.fair_slots import fair_share_key
from kinetod.permissions.caller_limits import RequestRate, Shares
from kinetod.permissions.role_policy import Via
from support.service.callers import caller

ADA = CallerStatus(key="uid 1000", who="ada", via=Via.UNIX, uid=1000)
ROOT = CallerStatus(key="uid 0", who="root", via=Via.UNIX, uid=0, admin=True)
THROUGH = CallerStatus(key="uid 1001", who="bob", via=Via.UNIX, uid=1001, proxy=caller(77))


class Made:
    """A doorkeeper with room for one call of each, and one request a second."""

    def __init__(self, folder: Path, standing: CallerStatus = ADA, introduced: str | NotPermitted = "") -> None:
        self.held: list[tuple[str, float]] = []
        self.vouched: list[tuple[str, str]] = []
        self._introduced, self._standing = introduced, standing
        self._log = folder / "audit"
        self._audit = AuditLog(self._log, clock=lambda: 0)
        rate = RequestRate(lambda: 1, clock=lambda: 0.0)
        shares = Shares(Reason.TOO_MANY_CALLS, "calls", "access.max", own=lambda: 1, in_all=lambda: 99)
        self.keeper = CallTracker(
            cast("Callers", self), shares, rate, self._audit,
            hold=lambda *given: self.held.append(given), vouch=lambda *given: self.vouched.append(given),
        )  # fmt: skip

    def standing(self, _connection: str, _auth: object) -> CallerStatus:
        return self._standing

    async def introduce(self, _connection: str, _auth: object) -> str:
        if isinstance(self._introduced, NotPermitted):
            raise self._introduced
        return self._introduced

    def entered(self, *, ungated: bool = False, unidentified: NotPermitted | None = None) -> Any:
        return self.keeper.entered("GetHost", "c1", {}, ungated=ungated, unidentified=unidentified)

    def lines(self) -> list[dict[str, Any]]:
        self.keeper.close()
        self._audit.close()
        return [json.loads(line) for line in self._log.read_text().splitlines()]


def on_the_loop(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test where the daemon does."""

    @functools.wraps(test)
    def run(**given: Any) -> None:
        async def on_it() -> None:
            test(**given)

        asyncio.run(on_it())

    return run


@on_the_loop
def test_a_call_beyond_ones_share_is_refused_paused_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, counted = Made(tmp_path), list[str]()
    monkeypatch.setattr(metrics, "limited", counted.append)
    with made.entered():
        assert fair_share_key.get() == "uid 1000"
        with pytest.raises(Exhausted) as refused, made.entered():
            pass
    assert refused.value.reason is Reason.TOO_MANY_CALLS
    assert (made.held, counted) == ([("c1", PENALTY_S)], ["TOO_MANY_CALLS"])
    with made.entered():  # the first one is over
        pass
    (line,) = made.lines()
    assert (line["call"], line["decision"], line["reason"], line["uid"]) == (
        "GetHost", "refused", "TOO_MANY_CALLS", 1000,
    )  # fmt: skip


def test_an_administrator_has_more_than_a_users_share(tmp_path: Path) -> None:
    made = Made(tmp_path, ROOT)
    with made.entered(), made.entered():
        assert made.held == []


@on_the_loop
def test_who_shares_a_connection_with_others_is_refused_without_a_pause_for_them(tmp_path: Path) -> None:
    made = Made(tmp_path, THROUGH)
    with made.entered(), pytest.raises(Exhausted), made.entered():
        pass
    assert made.held == []
    assert made.lines()[0]["proxy"] == {"uid": 77, "user": "user77"}


@on_the_loop
def test_what_passes_no_gate_is_counted_and_written_here(tmp_path: Path) -> None:
    made = Made(tmp_path)
    allowed = 0
    with pytest.raises(Exhausted) as refused:
        while allowed < 100:
            with made.entered(ungated=True):
                allowed += 1
    assert refused.value.reason is Reason.TOO_MANY_REQUESTS
    assert 0 < allowed < 100
    decisions = [line["decision"] for line in made.lines()]
    assert {"allowed", "refused"} == set(decisions) and len(decisions) < allowed + 2  # the others are counted


def test_what_passes_a_gate_is_counted_and_written_there(tmp_path: Path) -> None:
    made = Made(tmp_path)
    for _ in range(100):
        with made.entered():
            pass
    assert made.lines() == []


@pytest.mark.parametrize(("user", "vouched"), [("ada", [("c1", "ada")]), ("", [])])
def test_a_connection_is_vouched_for_by_who_has_a_token(
    tmp_path: Path, user: str, vouched: list[tuple[str, str]]
) -> None:
    made = Made(tmp_path, introduced=user)
    asyncio.run(made.keeper.introduced("c1", {}))
    assert made.vouched == vouched


@on_the_loop
def test_whoever_shares_a_limit_for_want_of_an_api_server_is_told_that(tmp_path: Path) -> None:
    unavailable = NotPermitted(Reason.KUBERNETES_UNAVAILABLE, "no answer")
    made = Made(tmp_path, introduced=unavailable)
    with made.entered(unidentified=unavailable):  # there is room: the call itself will report it
        with pytest.raises(NotPermitted) as refused, made.entered(unidentified=unavailable):
            pass
        assert refused.value is unavailable
    assert made.held == [("c1", PENALTY_S)]
    assert [line["reason"] for line in made.lines()] == ["KUBERNETES_UNAVAILABLE"]


def test_a_caller_who_cannot_be_identified_is_vouched_for_by_nobody(tmp_path: Path) -> None:
    unavailable = NotPermitted(Reason.KUBERNETES_UNAVAILABLE, "no answer")
    made = Made(tmp_path, introduced=unavailable)
    assert asyncio.run(made.keeper.introduced("c1", {})) is unavailable
    assert made.vouched == []


@on_the_loop
def test_of_a_flood_by_a_caller_the_caller_is_written(tmp_path: Path) -> None:
    made = Made(tmp_path)
    for _ in range(50):
        made.keeper.flooded("GetHost", "c1", caller(1000), Exhausted(Reason.TOO_MANY_REQUESTS, "wait"))
    lines = made.lines()
    assert [line.get("count") for line in lines] == [None, 49]
    assert (lines[0]["user"], lines[0]["roles"]) == ("user1000", ["jobs", "own"])
    assert len(made.held) == 50
