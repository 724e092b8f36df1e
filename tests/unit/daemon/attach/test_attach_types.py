"""What a failed attach is told as when the process has become another program meanwhile."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetod.attach.attach_types import AttachCode, AttachError, AttachRequest, Deadline
from kinetod.processes import credentials
from kinetod.processes.identity import BOOT_TIME_NS, PROC, ProcessKey, start_time_ns
from support.waiting import scaled, until

MEANWHILE = (
    AttachCode.GONE, AttachCode.UNSUITABLE, AttachCode.FAILED, AttachCode.TIMEOUT, AttachCode.NOT_PERMITTED,
)  # fmt: skip


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


@pytest.mark.parametrize("code", MEANWHILE)
def test_a_process_that_has_become_another_program_is_told_as_that(
    process: "subprocess.Popen[bytes]", code: AttachCode
) -> None:
    request, error = approved(process.pid), AttachError(code, "as it was seen")
    assert request.explained(error) is error
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None
    until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n", "it has become sleep")
    assert request.explained(error).code is AttachCode.REPLACED
