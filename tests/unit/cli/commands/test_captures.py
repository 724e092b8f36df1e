"""Pinned, verified, uploaded captures on the command line."""

import json
from pathlib import Path

import pytest
from kineto_protos.v1 import profiler_pb2 as pb
from kinetoctl.output.capture_summary import kept_lines
from kinetoctl.output.listing import where
from support.service import captures
from support.service.cli import Run
from support.service.fake_profiler import FakeServer


def finished() -> pb.Capture:
    made = captures.capture(captures.done_target(), status=pb.CAPTURE_STATUS_DONE)
    made.ended_ns = captures.START_NS
    return made


def test_pin_and_unpin_name_each_capture(server: FakeServer, run: Run) -> None:
    assert run("captures", "pin", "a", "b").stdout == "a pinned\nb pinned\n"
    assert json.loads(run("captures", "unpin", "a", "-o", "json").stdout) == {"unpinned": ["a"]}
    assert [(each.id, each.pinned) for each in server.profiler.requests] == [("a", True), ("b", True), ("a", False)]


def test_delete_can_leave_the_uploaded_copy(server: FakeServer, run: Run) -> None:
    run("captures", "delete", "a", "--keep-uploaded")
    assert server.profiler.requests[0].keep_uploaded


def test_verify_shows_each_file_and_fails_for_a_damaged_one(server: FakeServer, run: Run) -> None:
    server.profiler.checks = [
        pb.FileCheck(pid=7, format="chrome", size_bytes=1024),
        pb.FileCheck(name="target.json", uploaded=True, size_bytes=1024, problem="is gone"),
    ]
    result = run("captures", "verify", "c0ffee", "--uploaded")
    assert [" ".join(line.split()) for line in result.stdout.splitlines()] == [
        "CAPTURE PID FILE COPY SIZE RESULT",
        "c0ffee 7 chrome local 1.0 KiB OK",
        "c0ffee - target.json uploaded 1.0 KiB DAMAGED: is gone",
    ]
    assert result.code == 5
    assert server.profiler.requests[0].uploaded


def test_verify_without_id_takes_all_that_have_ended(server: FakeServer, run: Run) -> None:
    server.profiler.pages = [pb.ListCapturesResponse(captures=[finished(), captures.capture()])]
    server.profiler.checks = [pb.FileCheck(pid=7, format="chrome")]
    result = run("captures", "verify", "-o", "json")
    assert result.code == 0
    assert [each["capture_id"] for each in json.loads(result.stdout)] == ["c0ffee"]


def test_show_tells_damage_pin_and_upload(server: FakeServer, run: Run) -> None:
    stored = finished()
    stored.pinned = True
    stored.local_bytes = 0
    stored.targets[0].files[0].damage = "has 3 bytes instead of 5"
    stored.upload.CopyFrom(pb.Upload(state=pb.UPLOAD_STATE_UPLOADED, url="s3://b/h/c0ffee", bytes=1 << 20))
    server.profiler.stored = stored
    lines = run("captures", "show", "c0ffee").stdout.splitlines()
    assert lines[1] == "pinned: retention does not remove it"
    assert lines[2].startswith("uploaded to s3://b/h/c0ffee (1.0 MiB, verified ")
    assert lines[2].endswith("; its files are no longer on the host")
    assert "  damaged     chrome is damaged: it has 3 bytes instead of 5" in lines


def stored_on_a_host(server: FakeServer) -> None:
    """A trace of three steps."""
    step = {"ph": "X", "cat": "user_annotation", "pid": 7, "tid": 7, "dur": 50}
    events = [{**step, "name": f"ProfilerStep#{number}", "ts": 1_000 + 50 * number} for number in range(3)]
    events.append({**step, "name": "aten::mm", "cat": "cpu_op", "ts": 1_010, "dur": 20})
    content = json.dumps({"traceEvents": events}).encode()
    made = captures.capture(captures.done_target(content=content), status=pb.CAPTURE_STATUS_DONE)
    server.profiler.content = content
    server.profiler.stored, server.profiler.pages = made, [pb.ListCapturesResponse(captures=[made])]


def test_fetching_from_several_hosts_ends_with_the_verdict_on_the_job(
    server: FakeServer, run: Run, tmp_path: Path
) -> None:
    stored_on_a_host(server)
    fetch = ("captures", "fetch", "c0ffee", "--host", server.address, "--output-dir", str(tmp_path))
    result = run(*fetch)
    assert (result.code, result.stdout.startswith("A step takes 50 µs on average. ")) == (0, True), result
    assert run(*fetch, "-o", "json").json()["answer"]["verdict"].startswith("A step takes 50 µs on average. ")


def test_ctrl_c_while_fetched_traces_are_analysed_is_130_with_the_result(
    server: FakeServer, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(_paths: list[Path]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kineto_trace.catalog.first_screen.first_screen_of", leave)
    stored_on_a_host(server)
    result = run("captures", "fetch", "c0ffee", "--host", server.address, "--output-dir", str(tmp_path))
    assert (result.code, f"files: {tmp_path}/kineto-c0ffee/\n" in result.stdout) == (130, True), result


@pytest.mark.parametrize(
    ("state", "words", "line"),
    [
        (pb.UPLOAD_STATE_WAITING, "local, to upload", "waiting to be uploaded to s3://b"),
        (pb.UPLOAD_STATE_RUNNING, "local, uploading", "uploading to s3://b: 0 B of 2.0 KiB"),
        (
            pb.UPLOAD_STATE_RETRYING,
            "local, upload failing",
            "the upload to s3://b failed 3 times: no; uploads are now disabled",
        ),
    ],
)
def test_the_state_of_an_upload_in_words(state: pb.UploadState, words: str, line: str) -> None:
    made = finished()
    made.upload.CopyFrom(pb.Upload(state=state, url="s3://b", total_bytes=2048, failures=3, error="no"))
    assert where(made) == words
    assert list(kept_lines(made)) == [line]
