"""Lock, notify, text, watch, conversion, host."""

import asyncio
import hashlib
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetod.base.errors import StartError
from kinetod.base.instance_lock import Lock
from kinetod.base.notify import notify
from kinetod.base.safe_text import clean, clean_code
from kinetod.captures.live_capture import Watchers, new_id
from kinetod.captures.result.decode_pool import DecodeError
from kinetod.captures.target.conversion import checked, overhead_of


def test_a_lock_is_held_once_and_names_its_holder(tmp_path: Path) -> None:
    with (
        Lock(tmp_path / "lock", "the thing"),
        pytest.raises(StartError, match=rf"another kinetod \(pid {os.getpid()}\) is already using the thing"),
    ):
        Lock(tmp_path / "lock", "the thing")
    Lock(tmp_path / "lock", "the thing").release()
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o600


def test_a_lock_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file or directory"):
        Lock(tmp_path / "nowhere" / "lock", "the thing")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: another user made the file")
def test_a_lock_of_another_user_says_what_to_do(tmp_path: Path) -> None:
    Lock(tmp_path / "lock", "the thing").release()
    os.seteuid(65534)
    try:
        with pytest.raises(StartError, match=rf"Permission denied.*give {tmp_path} and everything in it to this user"):
            Lock(tmp_path / "lock", "the thing")
    finally:
        os.seteuid(0)


def test_the_service_manager_is_told(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "n"))
        environ = {"NOTIFY_SOCKET": str(tmp_path / "n")}
        notify("READY=1", environ)
        assert manager.recv(100) == b"READY=1"
    notify("READY=1", environ)  # nobody listens any more
    notify("READY=1", {})


def test_text_from_outside_is_made_harmless() -> None:
    assert clean("a\nb\x1b[31m\ud800", 100) == "a b [31m?"
    assert clean("abc", 2) == "ab"
    assert clean_code("CUPTI_BUSY", "X") == "CUPTI_BUSY"
    assert clean_code("drop table", "X") == "X"


def test_a_slow_watcher_gets_the_latest_state_once() -> None:
    capture = pb.Capture(status=pb.CAPTURE_STATUS_RUNNING)
    capture.targets.add(pid=7)
    watchers = Watchers(capture)

    async def watch() -> list[pb.CaptureEvent]:
        events = watchers.events(lambda: False)
        seen = [await events.__anext__()]
        for records in range(1000):
            del capture.targets[0].counts[:]
            capture.targets[0].counts.add(source="s", records=records)
            watchers.changed(0)
        seen.append(await events.__anext__())
        capture.status = pb.CAPTURE_STATUS_DONE
        watchers.ended()
        seen += [event async for event in events]
        return seen

    first, changed, last = asyncio.run(watch())
    assert first.snapshot.status == pb.CAPTURE_STATUS_RUNNING
    assert changed.target.counts[0].records == 999
    assert last.snapshot.status == pb.CAPTURE_STATUS_DONE


def test_ids_sort_by_time() -> None:
    first, second = new_id(1_800_000_000_999_000_000), new_id(1_800_000_001_000_000_000)
    assert first.startswith("20270115-080000-999-")
    assert second.startswith("20270115-080001-000-")
    assert first < second


def answer(path: Path, **changes: Any) -> dict[str, Any]:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "files": [["chrome", "trace.json.gz", path.stat().st_size, digest]],
        "summary": {"activities": {"kernel": 2}, "gpu_busy_fraction": -1, "key_of_tomorrow": 1},
        "warnings": ["careful\n"],
        "records_undecoded": 3,
        "cut": ["the x file is not whole"],
        "traced": True,
        **changes,
    }


def test_a_workers_answer_is_checked_against_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(b"trace")
    converted = checked(answer(path), tmp_path, ("chrome",), "gpu.host", 7)
    (file,) = converted.files
    assert file.size_bytes == 5
    assert file.name.startswith("gpu_host_7.")
    assert file.name.endswith(".pt.trace.json.gz")
    assert converted.summary.activities["kernel"] == 2
    assert (converted.warnings, converted.unreadable) == (("careful ",), 3)
    assert converted.cut == ("the x file is not whole",)


def test_an_answer_without_a_trace_needs_no_trace_file(tmp_path: Path) -> None:
    (tmp_path / "memory_snapshot.pickle").write_bytes(b"snapshot")
    digest = hashlib.sha256(b"snapshot").hexdigest()
    files = [["memory-snapshot", "memory_snapshot.pickle", 8, digest]]
    answered = answer(tmp_path / "memory_snapshot.pickle", files=files, traced=False, summary={})
    (file,) = checked(answered, tmp_path, ("chrome",), "gpu.host", 7).files
    assert file.name.endswith(".pt.memory_snapshot.pickle")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"files": [["chrome", "trace.json.gz", 5, "0" * 64]]}, "FILE_DAMAGED"),
        ({"files": []}, "DECODE_FAILED"),
        ({"files": [["chrome", "x", 5, "0"], ["xml", "../x", 5, "0"]]}, "FILE_DAMAGED"),
        ({"files": "nonsense"}, "DECODE_FAILED"),
        ({"summary": {"activities": 3}}, "DECODE_FAILED"),
        ({"summary": {"\udfff": 3}}, "DECODE_FAILED"),
        ({"summary": ["f\udfff"]}, "DECODE_FAILED"),
        ({"warnings": None}, "DECODE_FAILED"),
    ],
)
def test_a_wrong_answer_is_refused(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(b"trace")
    with pytest.raises(DecodeError) as caught:
        checked(answer(path, **changes), tmp_path, ("chrome",), "h", 7)
    assert caught.value.code == code


def test_figures_of_an_agent_are_taken_as_far_as_they_are_numbers() -> None:
    values = {"start_ns": 5, "stop_ns": -1, "detach_ns": "x", "agent_cpu_ns": 2**70, "step_ratio": 1.5}
    assert overhead_of(values) == pb.Overhead(start_ns=5, step_ratio=1.5)
