"""What a failed attach is told as when the process has become another program meanwhile."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetod.attach.attach_types import AttachCode, AttachError, AttachRequest, Deadline
from kinetod.processes import credentials
from kinetod.processes.identity import BOOT_TIME_NS, PROC, ProcessKey, start_time_ns
from support.waiting import scaled, until


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    """A shell that becomes `sleep` when its standard input ends."""
    started = subprocess.Popen(["sh", "-c", "read line; exec sleep 1000"], stdin=subprocess.PIPE)
    until(lambda: Path(f"/proc/{started.pid}/comm").read_text() == "sh\n", "the shell runs")
    yield started
    started.kill()
    started.communicate(timeout=scaled(20))


def approved(pid: int) -> AttachRequest:
    key = ProcessKey(pid, start_time_ns(pid, PROC, boot_time_ns=BOOT_TIME_NS))
    return AttachRequest(key=key, approved=credentials.read(pid), deadline=Deadline(20), token=time.time_ns())


@pytest.mark.parametrize("code", AttachCode)
def test_a_process_that_has_become_another_program_is_told_as_that(
    process: "subprocess.Popen[bytes]", code: AttachCode
) -> None:
    request, error = approved(process.pid), AttachError(code, "as it was seen")
    kept = request.explained(error)
    assert kept is error or (code, kept.code) == (AttachCode.GONE, AttachCode.FAILED)
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None
    until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n", "it has become sleep")
    assert request.explained(error).code is AttachCode.REPLACED


def test_a_process_that_has_ended_is_told_as_that(process: "subprocess.Popen[bytes]") -> None:
    request, error = approved(process.pid), AttachError(AttachCode.GONE, "process 1 has ended")
    process.kill()
    until(lambda: Path(f"/proc/{process.pid}/stat").read_text().split()[2] == "Z", "it is a zombie")
    assert request.explained(error) is error


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change the user")
@pytest.mark.parametrize("code", [AttachCode.UNSUPPORTED, AttachCode.UNSUITABLE, AttachCode.FAILED])
def test_a_process_that_changes_its_user_all_the_time_is_told_as_that(code: AttachCode) -> None:
    changing = "import os\nprint('up', flush=True)\nwhile True: os.seteuid(65534); os.seteuid(0)"
    with subprocess.Popen([sys.executable, "-c", changing], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            request, error = approved(process.pid), AttachError(code, "cannot find its standard library")
            # A machine that is busy may keep it from running for as long as it is looked at.
            found = until(lambda: better(request, error), "it was seen to change")
            assert found.code is AttachCode.REPLACED
            assert "credentials (its user ids changed from 0" in found.reason
        finally:
            process.kill()


def better(request: AttachRequest, error: AttachError) -> AttachError | None:
    found = request.explained(error)
    return found if found is not error else None
