"""What a decision about a process rests on: read, compared, sent."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kinetod.processes import credentials
from kinetod.processes.credentials import Credentials
from support.service.approvals import PLAIN
from support.service.calls_as import plain_python
from support.waiting import until

KNOWN = replace(PLAIN, user_namespace=1, executable=(1, 2), program="a")


def test_the_kernel_says_who_we_are_and_what_we_run() -> None:
    found, status = credentials.read(os.getpid()), Path("/proc/self/exe").stat()
    assert (found.uids[:3], found.gids[:3]) == (os.getresuid(), os.getresgid())
    assert found.executable == (status.st_dev, status.st_ino)
    assert found.user_namespace == Path("/proc/self/ns/user").stat().st_ino
    assert credentials.read(os.getpid(), os.getpid()) == found


def test_the_same_program_executed_anew_is_another_program() -> None:
    text = (
        "import os, sys\nprint(flush=True)\nsys.stdin.readline()\nos.execv(sys.executable, [sys.executable, '-c', %r])"
    )
    waits = "import sys\nprint(flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", text % waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        before = credentials.read(process.pid)
        process.stdin.write(b"\n")
        process.stdout.readline()
        after = credentials.read(process.pid)
        process.stdin.close()
    assert before.difference(after) == "its program changed"
    assert replace(before, program="") == replace(after, program="")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"uids": (1000, 0, 0, 0)}, "its user ids changed from 1000 to 1000, 0"),
        ({"gids": (1000, 42, 42, 42)}, "its group ids changed from 1000 to 1000, 42"),
        ({"capabilities": 1 << 21}, "its capabilities changed from 0x0 to 0x200000"),
        ({"dumpable": False}, "it has become undumpable"),
        ({"user_namespace": 9}, "its user namespace changed"),
        ({"executable": (1, 3)}, "its executable changed"),
        ({"program": "b"}, "its program changed"),
        ({"user_namespace": None, "executable": None, "program": "", "dumpable": None}, ""),
        ({}, ""),
    ],
)
def test_every_difference_is_seen_but_what_is_not_known(changes: dict[str, Any], what: str) -> None:
    assert KNOWN.difference(replace(KNOWN, **changes)) == what


def test_they_arrive_as_they_were_sent() -> None:
    assert Credentials.from_dict(json.loads(json.dumps(KNOWN.to_dict()))) == KNOWN
    with pytest.raises(ValueError, match="four ids"):
        Credentials.from_dict({**KNOWN.to_dict(), "uids": [1]})
    with pytest.raises(ValueError, match="not credentials"):
        Credentials.from_dict({"uids": [1, 1, 1, 1]})


def test_nobody_has_none() -> None:
    with pytest.raises(ProcessLookupError):
        credentials.read(2**22 + 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="users are played by root")
def test_a_process_that_made_itself_undumpable_is_told() -> None:
    text = "import ctypes, sys\nctypes.CDLL(None).prctl(4, 0)\nprint(flush=True)\nsys.stdin.read()"
    with subprocess.Popen([*plain_python(12345), "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        assert until(lambda: credentials.read(process.pid), "it is read").dumpable is False
        process.stdin.close()
