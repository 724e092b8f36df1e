"""The process that looks at the host: what it found by then counts, whatever becomes of it."""

import asyncio
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from kinetod.attach.attach_types import Status
from kinetod.host_checks import check_runner
from kinetod.host_checks.check_protocol import CheckQuestion
from kinetod.host_checks.check_runner import HostLooker, Looked
from kinetod.profilers import ProfilingTool, Scan
from support.waiting import scaled

QUESTION = CheckQuestion(daemon_pid=os.getpid(), store="/", needed_bytes=0, helper=False)
SAY = (
    'import sys; sys.stdin.read(); print(\'{"next":"a"}\\n{"findings":[["a","OK","x",""]],"next":"b"}\', flush=True); '
)


def look(code: str | None = None, deadline_s: float = 20) -> Looked:
    async def ask() -> Looked:
        if code is None:
            return await HostLooker(deadline_s=scaled(60)).look(QUESTION)
        return await HostLooker(command=(sys.executable, "-S", "-c", code), deadline_s=deadline_s).look(QUESTION)

    return asyncio.run(ask())


@pytest.fixture(autouse=True)
def an_answer_is_not_old_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_runner, "MAX_AGE_S", 1000.0)


def test_all_checks_are_made_on_this_host(tmp_path: Path) -> None:
    found = look()
    names = [each.name for each in found.findings]
    assert names[:7] == ["permissions", "ptrace_scope", "seccomp", "namespaces", "python", "sandbox", "clock"]
    assert {"gpu_counters", "cupti", "store"} <= set(names)
    assert found.scan is not None
    assert all(each.detail for each in found.findings)


@pytest.mark.parametrize(
    ("code", "deadline_s", "why"),
    [
        (f"{SAY} sys.stdin = open(0); import signal; signal.pause()", scaled(2), "did not finish within "),
        (f"{SAY} import os; os.kill(os.getpid(), 9)", 20, "failed (exit status -9)"),
        (f"{SAY} raise SystemExit(0)", 20, "the check process ended early"),
        (f"{SAY} print('nonsense')", 20, "sent an invalid answer"),
    ],
    ids=["hangs", "crashes", "ends early", "talks nonsense"],
)
def test_a_check_that_does_not_end_well_is_unknown_and_the_others_count(code: str, deadline_s: float, why: str) -> None:
    first, last = look(code, deadline_s).findings
    assert (first.name, first.status) == ("a", Status.OK)
    assert (last.name, last.status) == ("b", Status.UNKNOWN)
    assert why in last.detail


def test_a_process_that_cannot_be_started_is_told() -> None:
    async def ask() -> Looked:
        return await HostLooker(command=("/none",)).look(QUESTION)

    (one,) = asyncio.run(ask()).findings
    assert one.status is Status.UNKNOWN


def test_who_asks_at_the_same_time_shares_one_look_and_another_question_gets_its_own(tmp_path: Path) -> None:
    log = tmp_path / "looks"
    code = f"import sys; sys.stdin.read(); open({str(log)!r}, 'a').write('x'); print('{{}}')"

    async def ask() -> None:
        looker = HostLooker(command=(sys.executable, "-S", "-c", code))
        await asyncio.gather(*(looker.look(QUESTION) for _ in range(20)))
        assert log.read_text() == "x"
        await looker.look(CheckQuestion(daemon_pid=1, store="/", needed_bytes=0, helper=False, only_profilers=True))
        assert log.read_text() == "xx"

    asyncio.run(ask())


class Helper:
    """Stands for the attach helper service: it finds Nsight in every process but the last one, in its own time."""

    def __init__(self, takes_s: float = 0) -> None:
        self.asked = list[list[int]]()
        self._takes_s = takes_s

    async def profilers(self, pids: Iterable[int]) -> tuple[set[int], list[ProfilingTool]]:
        """As the service's client says it."""
        self.asked.append(list(pids))
        await asyncio.sleep(self._takes_s)
        seen = self.asked[-1][:-1]
        return set(seen), [ProfilingTool(product="Nsight Systems", pid=pid) for pid in seen]


SAY_HIDDEN = """import sys
sys.stdin.read()
print('{"scan":{"profilers":[{"product":"nvprof","pid":7},{"product":"DCGM","pid":9}],"hidden":[7,8,9]}}')
"""


@pytest.mark.parametrize(
    ("helper", "deadline_s", "found"),
    [
        (Helper(), 20, [("Nsight Systems", 7), ("Nsight Systems", 8), ("DCGM", 9)]),
        (Helper(takes_s=600), scaled(2), [("nvprof", 7), ("DCGM", 9)]),
        (None, 20, [("nvprof", 7), ("DCGM", 9)]),
    ],
    ids=["asked", "too late", "none"],
)
def test_the_helper_is_asked_about_the_processes_that_may_not_be_looked_into(
    helper: Helper | None, deadline_s: float, found: list[tuple[str, int]]
) -> None:
    async def ask() -> list[Scan | None]:
        looker = HostLooker(command=(sys.executable, "-S", "-c", SAY_HIDDEN), deadline_s=deadline_s, helper=helper)
        return [(await looker.look(QUESTION)).scan for _ in range(2)]

    first, again = asyncio.run(ask())
    assert first is not None and first == again
    assert [(each.product, each.pid) for each in first.profilers] == found
    assert helper is None or helper.asked == [[7, 8, 9]]  # once: the second look shares it
