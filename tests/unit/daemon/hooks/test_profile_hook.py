"""The hook that pushes profiles: what becomes of a try that ends early, and what gets into the log."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from kinetod.config.settings import Config
from kinetod.hooks import profile_hook
from kinetod.hooks.hook_types import FOLDER_VARIABLE, Ended, HookOutcome, HookResult
from kinetod.hooks.profile_hook import ProfileHook
from support.profiles.receiver import secret_file
from support.waiting import scaled

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
    monkeypatch.setattr(profile_hook, "_COMMAND", ("/bin/sh", "-c", text))
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
    monkeypatch.setattr(profile_hook, "_OWN_S", 0.0)
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
    assert outcome.text == "cannot be called: its process ended with status 3: MemoryError"
    assert outcome.again
