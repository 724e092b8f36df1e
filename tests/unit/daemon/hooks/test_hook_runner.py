"""Which hooks are told of which captures, how often, and how many at a time."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.base import metrics
from kinetod.config.settings import Config, Settings
from kinetod.hooks import hook_runner
from kinetod.hooks.hook_runner import MAX_WAITING, HookRunner, ProfileHook, configured
from kinetod.hooks.hook_types import FOLDER_VARIABLE, Ended, HookOutcome, HookResult
from support.profiles.receiver import secret_file
from support.service.kept import ended_capture
from support.waiting import scaled, soon

FAILED = HookOutcome(result=HookResult.FAILED, text="no", again=True)
OK = HookOutcome(result=HookResult.OK)
CONFIG = Config(listen=(), agent_socket=Path("/a"), state_dir=Path("/s"))
ADDRESS = "otlp+http://127.0.0.1:9"
BODY = json.dumps(
    {
        "targets": [
            {"pid": 1, "start_time_ns": 9, "files": [{"format": "perfetto"}]},
            {"pid": 2, "start_time_ns": 9, "files": []},  # it failed
            {"pid": 3, "start_time_ns": 9, "files": [{"format": "memory-snapshot"}]},
        ]
    }
)
ENDED = Ended(capture_id="c1", status="DONE", variables={FOLDER_VARIABLE: "/captures/c1"}, body=BODY.encode())


def script(monkeypatch: pytest.MonkeyPatch, folder: Path, *lines: str) -> Path:
    """Puts a program in the sender's place, which notes what it was asked and runs these lines. Returns the note."""
    asked = folder / "asked"
    text = "\n".join([f"cat > {asked}", *lines])
    monkeypatch.setattr(hook_runner, "_PROFILE_COMMAND", ("/bin/sh", "-c", text))
    return asked


def hook(headers: Path | None = None) -> ProfileHook:
    return ProfileHook(replace(CONFIG, hook_profiles=ADDRESS, hook_profiles_headers=headers))


def called(made: ProfileHook, timeout_s: float = 20.0) -> HookOutcome:
    return asyncio.run(made.call(ENDED, timeout_s))


def test_the_sender_is_told_where_what_and_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = script(monkeypatch, tmp_path, """echo '{"text": "", "again": false, "after_s": 0.0}'""")
    assert called(hook()) == HookOutcome(result=HookResult.OK)
    told = json.loads(asked.read_text())
    assert (told["address"], told["folder"], told["timeout_s"], told["sent"]) == (ADDRESS, "/captures/c1", 20.0, [])
    assert told["targets"] == ["1-9"]
    assert told["memory_bytes"] == CONFIG.decode_memory_bytes


def test_a_try_that_is_cut_short_is_not_repeated_from_its_beginning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hook_runner, "_OWN_S", 0.0)
    asked = script(monkeypatch, tmp_path, """echo '{"sent": "1-9"}'""", "exec sleep 60")
    made = hook()
    outcome = called(made, scaled(1))
    assert (outcome.result, outcome.again) == (HookResult.TIMEOUT, True)
    called(made, scaled(1))
    assert json.loads(asked.read_text())["sent"] == ["1-9"]


def test_a_refusal_is_told_without_the_headers_even_if_the_receiver_says_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    headers = secret_file(tmp_path / "headers", "X-Key: s3cretvalue\nAuthorization: Basic dXNlcjpwYXNz\n")
    answer = {"text": "answered 401: no s3cretvalue, no dXNlcjpwYXNz", "again": True, "after_s": 7.0}
    script(monkeypatch, tmp_path, f"echo '{json.dumps(answer)}'")
    outcome = called(hook(headers))
    assert outcome == HookOutcome(
        result=HookResult.FAILED, text="answered 401: no (hidden), no (hidden)", again=True, after_s=7.0
    )


def test_a_sender_that_crashes_is_told_with_its_last_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script(monkeypatch, tmp_path, "echo MemoryError >&2", "exit 3")
    outcome = called(hook())
    assert outcome.text == "cannot be called: its process exited with status 3: MemoryError"
    assert outcome.again


class Hook:
    """Answers with these outcomes, then OK; waits for `open` in each call."""

    kind = "command"

    def __init__(self, *outcomes: HookOutcome, name: str = "hook") -> None:
        self.name = name
        self.outcomes = list(outcomes)
        self.told: list[Ended] = []
        self.now = self.most = 0
        self.open = asyncio.Event()
        self.open.set()

    async def call(self, ended: Ended, timeout_s: float) -> HookOutcome:
        self.told.append(ended)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await self.open.wait()
        finally:
            self.now -= 1
        return self.outcomes.pop(0) if self.outcomes else OK


def count(result: str) -> float:
    return metrics.REGISTRY.get_sample_value("kineto_hook_calls_total", {"hook": "command", "result": result}) or 0.0


def run(hooks: list[Hook], act: Callable[[HookRunner], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        found = HookRunner(
            Settings(replace(CONFIG, **settings)),
            lambda name: Path("/s", name),
            hooks=lambda _: hooks,
            jitter=lambda: 0,
        )
        await act(found)
        await found.stop()
        assert found.waiting == 0

    asyncio.run(main())


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_runner, "FIRST_PAUSE_S", 0.001)


async def idle(found: HookRunner) -> None:
    await soon(lambda: not found.waiting, "no hook waits")


def test_a_hook_gets_the_capture_as_kinetoctl_shows_it_and_its_ids() -> None:
    hook = Hook()
    capture = ended_capture(1, b"x")
    capture.spec.labels["kineto.fleet"] = "f7"

    async def act(found: HookRunner) -> None:
        found.capture_ended(capture)
        capture.id = "changed later"
        await idle(found)

    run([hook], act)
    (ended,) = hook.told
    shown = json.loads(ended.body)
    assert (ended.capture_id, shown["id"], shown["status"]) == ("c1", "c1", "CAPTURE_STATUS_DONE")
    assert (shown["created_ns"], shown["targets"][0]["process"]["rank"]) == (1, None)
    assert ended.variables == {
        "KINETO_CAPTURE_ID": "c1",
        "KINETO_CAPTURE_STATUS": "DONE",
        "KINETO_CAPTURE_HOST": "gpu-7",
        "KINETO_CAPTURE_FOLDER": "/s/c1",
        "KINETO_CAPTURE_FLEET": "f7",
    }


@pytest.mark.parametrize(
    ("wanted", "told"),
    [(("all",), ["c1", "c2"]), (("failed", "partial"), ["c2"]), (("done",), ["c1"]), ((), []), (("cancelled",), [])],
)
def test_only_the_wanted_ends_are_told(wanted: tuple[str, ...], told: list[str]) -> None:
    hook = Hook()

    async def act(found: HookRunner) -> None:
        failed = ended_capture(2, b"x")
        failed.status = pb.CAPTURE_STATUS_FAILED
        found.capture_ended(ended_capture(1, b"x"))
        found.capture_ended(failed)
        await idle(found)

    run([hook], act, hook_on=wanted)
    assert [ended.capture_id for ended in hook.told] == told


def test_what_may_help_is_tried_again_for_a_while() -> None:
    hook, final = Hook(FAILED, FAILED), Hook(HookOutcome(result=HookResult.FAILED, text="never"), name="final")
    before = count("failed"), count("ok")

    async def act(found: HookRunner) -> None:
        found.capture_ended(ended_capture(1, b"x"))
        await idle(found)

    run([hook, final], act)
    assert (len(hook.told), len(final.told)) == (3, 1)
    assert (count("failed") - before[0], count("ok") - before[1]) == (3, 1)


def test_without_retries_and_after_their_time_there_is_one_try(caplog: pytest.LogCaptureFixture) -> None:
    hook = Hook(FAILED)
    late = Hook(HookOutcome(result=HookResult.FAILED, text="come back", again=True, after_s=700), name="late")

    async def act(found: HookRunner) -> None:
        found.capture_ended(ended_capture(1, b"x"))
        await idle(found)

    run([hook], act, hook_retry_ns=0)
    run([late], act)
    assert (len(hook.told), len(late.told)) == (1, 1)
    assert "hook hook of capture c1, attempt 1: no" in caplog.text


def test_few_run_at_a_time_and_each_hook_has_its_own_places() -> None:
    first, second = Hook(), Hook(name="second")
    first.open.clear()

    async def act(found: HookRunner) -> None:
        for number in range(5):
            found.capture_ended(ended_capture(number, b"x"))
        await soon(lambda: len(second.told) >= 5, "the second hook has all captures")
        assert (first.most, len(first.told)) == (2, 2)
        first.open.set()
        await idle(found)

    run([first, second], act)
    assert (first.most, len(first.told)) == (2, 5)


def test_what_comes_on_top_of_the_waiting_ones_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    hook = Hook()
    hook.open.clear()
    before = count("dropped")

    async def act(found: HookRunner) -> None:
        for number in range(MAX_WAITING + 3):
            found.capture_ended(ended_capture(number, b"x"))
        assert found.waiting == MAX_WAITING
        hook.open.set()
        await idle(found)

    run([hook], act)
    assert len(hook.told) == MAX_WAITING
    assert count("dropped") - before == 3
    assert f"is not called for capture c{MAX_WAITING}: {MAX_WAITING} captures are already waiting" in caplog.text


def test_a_stop_lets_what_waits_run_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_runner, "STOP_S", scaled(1))
    quick, stuck = Hook(), Hook(name="stuck")
    stuck.open.clear()
    before = count("dropped")

    async def act(found: HookRunner) -> None:
        found.capture_ended(ended_capture(1, b"x"))

    run([quick, stuck], act)
    assert (len(quick.told), len(stuck.told)) == (1, 1)
    assert count("dropped") - before == 1


def test_a_stop_ends_pauses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_runner, "FIRST_PAUSE_S", 50.0)
    hook = Hook(FAILED)

    async def act(found: HookRunner) -> None:
        found.capture_ended(ended_capture(1, b"x"))
        await soon(lambda: hook.told, "the hook is told")

    run([hook], act)
    assert len(hook.told) == 1


def test_whatever_goes_wrong_stays_here(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Hook):
        async def call(self, ended: Ended, timeout_s: float) -> HookOutcome:
            raise RuntimeError("a bug")

    async def act(found: HookRunner) -> None:
        found.capture_ended(ended_capture(1, b"x"))
        await idle(found)

    with caplog.at_level(logging.ERROR):
        run([Broken()], act)

        async def failing() -> None:
            def hooks(_: Config) -> list[Hook]:
                raise RuntimeError("another bug")

            HookRunner(Settings(CONFIG), Path, hooks=hooks).capture_ended(ended_capture(1, b"x"))

        asyncio.run(failing())
    assert "a bug" in caplog.text
    assert "another bug" in caplog.text


def test_the_configuration_says_which_hooks_there_are() -> None:
    assert configured(CONFIG) == []
    config = replace(CONFIG, hook_command=("/bin/true", "-x"), hook_webhooks=("https://h/p?key=secret",))
    assert [(hook.kind, hook.name) for hook in configured(config)] == [
        ("command", "/bin/true"),
        ("webhook", "https://h/p"),
    ]
    address = "otlp+https://collector:4318"
    assert [(hook.kind, hook.name) for hook in configured(replace(CONFIG, hook_profiles=address))] == [
        ("profiles", address)
    ]


# what one user's captures do to another's


def owned(number: int, uid: int) -> pb.Capture:
    capture = ended_capture(number, b"x")
    capture.owner_uid = uid
    return capture


async def told(hook: Hook, most: int) -> None:
    await soon(lambda: len(hook.told) >= most, "the hook is told often enough")


def test_who_fills_all_places_loses_own_ones_to_another_user() -> None:
    hook = Hook()
    hook.open.clear()
    before = count("dropped")

    async def act(found: HookRunner) -> None:
        for number in range(MAX_WAITING + 10):
            found.capture_ended(owned(number, 1001))
        for number in range(1000, 1005):
            found.capture_ended(owned(number, 1002))
        assert found.waiting == MAX_WAITING
        hook.open.set()
        await idle(found)

    run([hook], act)
    ids = {ended.capture_id for ended in hook.told}
    assert {f"c{number}" for number in range(1000, 1005)} <= ids
    assert len(ids) == MAX_WAITING
    assert "c0" in ids  # the newest went
    assert count("dropped") - before == 15


def test_two_who_share_all_places_take_none_of_each_other() -> None:
    hook = Hook()
    hook.open.clear()

    async def act(found: HookRunner) -> None:
        for number in range(MAX_WAITING):
            found.capture_ended(owned(number, 1001 + number % 2))
        for number in range(500, 510):
            found.capture_ended(owned(number, 1001))
        hook.open.set()
        await idle(found)

    run([hook], act)
    assert {ended.capture_id for ended in hook.told} == {f"c{number}" for number in range(MAX_WAITING)}


def test_calls_that_never_end_keep_no_other_user_waiting() -> None:
    hook = Hook()
    hook.open.clear()

    async def act(found: HookRunner) -> None:
        for number in range(20):
            found.capture_ended(owned(number, 1001))
        await told(hook, 1)
        found.capture_ended(owned(100, 1002))
        await soon(lambda: "c100" in {ended.capture_id for ended in hook.told}, "the other user's capture is told")
        assert hook.most == 2
        hook.open.set()
        await idle(found)

    run([hook], act, hook_parallel=1)
