"""Programs that faulthandler watches, under every Python of this machine."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kinetod.attach.attach_types import AttachCode, AttachError, Deadline
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.policy.preconditions import suitable_image
from kinetod.attach.policy.traceback_watchdog import await_quiet, find
from support.targets.live_target import pythons
from support.targets.python_versions import other_versions_slow
from support.waiting import scaled, until

PROGRAM = """
import faulthandler, itertools, sys
file = open(sys.argv[1], "w")
for line in itertools.chain(["dump_traceback_later(%s, file=file)" % sys.argv[2]], sys.stdin):
    eval("faulthandler." + line)
    print("done", flush=True)
"""
each_python = pytest.mark.parametrize("python", other_versions_slow(pythons()))


@contextmanager
def watched(
    arguments: str, file: Path = Path("/dev/null"), python: str = sys.executable
) -> Iterator["subprocess.Popen[str]"]:
    command = [python, "-c", PROGRAM, str(file), arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "done\n"
            yield process
        finally:
            process.kill()


@each_python
def test_a_process_that_dumps_often_is_refused_untouched(python: str) -> None:
    with watched("0.002, repeat=True", python=python) as process, pytest.raises(AttachError) as caught:
        suitable_image(process.pid)
    assert caught.value.code is AttachCode.UNSUITABLE
    assert "dump_traceback_later() watches it with a period of 0.002 s" in caught.value.reason
    assert caught.value.reason.endswith("; let it dump every 1 s at most, or cancel_dump_traceback_later()")


@each_python
def test_one_that_dumps_seldom_is_known_and_may_be_entered(python: str) -> None:
    with watched("3700.25", python=python) as process:
        until(lambda: (found := find(TargetImage(process.pid))) and found.left_s > 0, "it waits")
        image = suitable_image(process.pid)
        found = find(image)
        assert found is not None
        assert found.period_s == 3700.25
        assert 1800 < found.left_s <= 3700.25
        await_quiet(image, Deadline(scaled(60)))


@each_python
def test_one_that_was_cancelled_is_gone(python: str) -> None:
    with watched("0.002, repeat=True", python=python) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("cancel_dump_traceback_later()\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
        assert find(suitable_image(process.pid)) is None


def test_an_attach_waits_until_a_dump_that_is_due_has_been_written(tmp_path: Path) -> None:
    file = tmp_path / "dump"
    with watched("0.4", file) as process:
        await_quiet(TargetImage(process.pid), Deadline(scaled(60)))
        assert "Timeout" in file.read_text()
