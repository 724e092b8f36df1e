"""The examples of docs/orchestration.md about hooks do what they say."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.plain import plain
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.base import http_headers
from support.service.captures import capture, target

DOCUMENT = Path(__file__).parents[4] / "docs/orchestration.md"


def example(name: str) -> str:
    match = re.search(rf"<!-- example: {name} -->\n```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert match, name
    return match[1]


def names(code: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    exec(compile(code, str(DOCUMENT), "exec"), found)
    return found


def ended(status: pb.CaptureStatus = pb.CAPTURE_STATUS_PARTIAL, **labels: str) -> bytes:
    failed = target(4243, verdict=pb.VERDICT_FAILED, reason_code="PROCESS_EXITED", reason="it ended")
    found = capture(target(4242, verdict=pb.VERDICT_DONE), failed, status=status)
    found.spec.duration_ns = 10**9
    found.spec.labels.update(labels)
    return json.dumps(plain(found)).encode()


def test_the_command_notes_the_processes_that_were_not_recorded(tmp_path: Path) -> None:
    log = tmp_path / "failed.log"
    code = example("command").replace("/var/lib/kineto/failed.log", str(log))
    subprocess.run([sys.executable, "-c", code], input=ended(), check=True)
    assert log.read_text().split(maxsplit=1)[1] == "4243 PROCESS_EXITED it ended\n"


def test_the_check_of_a_signature_takes_ours_and_no_other() -> None:
    verified = names(example("verify"))["verified"]
    secret, body, now = b"a secret of some length", ended(), int(time.time())
    headers = http_headers.signed_headers(secret, "c1", now, body)
    assert verified(headers, body, secret)
    assert not verified(headers, body + b" ", secret)
    assert not verified(headers, body, b"another secret, as long")
    assert not verified(http_headers.signed_headers(secret, "c1", now - 3600, body), body, secret)


def test_the_watchdog_analyses_what_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        asked.append(command)
        rows = {"findings": {"columns": [], "notes": [], "rows": [{"title": "The GPU waits"}]}}
        return subprocess.CompletedProcess(command, 0, json.dumps(rows).encode())

    found = names(example("watchdog"))
    monkeypatch.setattr(found["subprocess"], "run", run)
    assert found["on_capture"](ended(why="slow-step"), "gpu-7:7331") == ["The GPU waits"]
    assert found["on_capture"](ended(), "gpu-7:7331") == []
    assert found["on_capture"](ended(pb.CAPTURE_STATUS_FAILED, why="slow-step"), "gpu-7:7331") == []
    (command,) = asked
    assert command[:4] == ["kinetoctl", "report", "--address", "gpu-7:7331"]
