"""Each step of an attach fails once, or is the last one of the process that attaches: the program is as before."""

import os
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from kineto_agent.protocol import wire
from kinetod.attach.attach_types import AttachError
from kinetod.attach.channel import payload
from kinetod.attach.inspect.target_image import read_maps
from kinetod.attach.inspect.target_memory import TargetMemory
from kinetod.attach.methods import collector_thread
from kinetod.attach.policy import preconditions
from support.agent.agent_daemon import Connection
from support.machine.descriptors import open_files
from support.targets import attach_steps
from support.targets.engine_target import needs_ptrace
from support.targets.live_target import LiveTarget, pythons
from support.waiting import scaled, until

NATIVE = "/bin/cat"
ATTACH_WORDS = re.compile(r"process \d+|attach helper cannot start a thread")


def on(versions: Sequence[str], *accesses: str) -> list[Any]:
    """Parameters: these releases as far as they are there, with these ways to the memory."""
    found = {path: next(part for part in path.split("/")[::-1] if "3." in part) for path in pythons()}
    return [
        pytest.param(path, access, id=f"{version} {access}")
        for path, version in (*found.items(), (NATIVE, NATIVE))
        for access in accesses
        if version.removeprefix("python").startswith(tuple(versions))
    ]


TRIED = [*on(["3.12"], "memory file"), *on([NATIVE], "no memory file")]
PARTS = 4  # each within the time that a test may take
pytestmark = [pytest.mark.slow, needs_ptrace]
SIGNALS = ("TracerPid", "SigPnd", "ShdPnd", "SigBlk", "SigIgn")


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    payload.agent()
    collector_thread.library()
    monkeypatch.setattr(preconditions, "uses_cuda", lambda _image: True)


def status(target: LiveTarget, fields: tuple[str, ...] = (*SIGNALS, "Threads")) -> list[str]:
    """What an attach could have left in it that its status shows."""
    return [line for line in Path(f"/proc/{target.pid}/status").read_text().splitlines() if line.startswith(fields)]


def look(target: LiveTarget, opened: Mapping[int, str]) -> object:
    """What it could have left there, or in the process that attaches, which had these files open."""
    return status(target), target.descriptors(), open_files(os.getpid()).items() - opened.items(), threading.enumerate()


OUR_PAGES = 0x6B69  # the upper half of their addresses
PAGE = 4096


def mapped(target: LiveTarget) -> tuple[int, Counter[str]]:
    """Bytes of our pages, and how many mappings each file has. The others are stacks and heaps of the C library."""
    maps = read_maps(target.pid)
    ours = sum(each.end - each.start for each in maps if each.start >> 32 == OUR_PAGES)
    return ours, Counter(each.path for each in maps if each.is_file)


def kept(redirects: Sequence[str], files: Counter[str], after: tuple[int, Counter[str]]) -> bool:
    """Whether it has a page for each redirection at most, and no more files than these."""
    return after[0] <= len(redirects) * PAGE and after[1] <= files


class Cat(LiveTarget):
    """A program without Python, which says what it hears."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [NATIVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid
        self._connections = []

    def _command(self, verb: str, text: str) -> str:
        del verb
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


def goes_on(target: LiveTarget, act: attach_steps.Act | None = None) -> None:
    """Attaches as ever."""
    with closing(Connection(attach_steps.attached(target.pid, act))) as connection:
        connection.socket.settimeout(scaled(20))
        if not isinstance(target, Cat):
            connection.expect(wire.Hello)


def targets(python: str) -> Generator[LiveTarget, None, None]:
    while True:
        target = LiveTarget(python) if python != NATIVE else Cat()
        try:
            assert target.ask("0") in (0, "0\n")
            yield target
        finally:
            target.kill()


def steps_of(python: str, part: int) -> tuple[list[str], Counter[str]]:
    """Those from the first one on before which the program could have been touched, in a part of their places; and the
    files that are mapped after all of them.
    """
    steps: dict[str, None] = {}
    with closing(targets(python)) as started:
        target = next(started)
        goes_on(target, attach_steps.noting(steps))
        target.until_alone()
        files = mapped(target)[1]
    found = list(steps)
    found = found[found.index(next(step for step in found if "_exclusive" in step)) :]
    places = list(dict.fromkeys(map(attach_steps.place, found)))[part::PARTS]
    return [step for step in found if attach_steps.place(step) in places], files


def ends_well(target: LiveTarget, step: str) -> None:
    assert target.process.stdin is not None
    target.process.stdin.close()
    target.process.stdin = None
    assert target.end() == (0, ""), step


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("python", "access"), TRIED)
def test_a_step_that_fails_leaves_nothing_and_says_so(
    python: str, access: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TargetMemory, "_opened", attach_steps.denied(access))
    failed = set[str]()
    steps, files = steps_of(python, part)
    for step, target in zip(steps, targets(python), strict=False):
        opened = open_files(os.getpid())
        before, redirects = look(target, opened), list[str]()
        for always, limit_s in ((False, 2.0), (True, 0.5)):
            if always and attach_steps.place(step) in failed:
                continue  # all steps of that place have failed together
            failed |= {attach_steps.place(step)} if always else set()
            failing = attach_steps.failing(step, redirects, always=always)
            try:
                attach_steps.attached(target.pid, failing, limit_s).close()
            except AttachError as error:
                assert ATTACH_WORDS.search(error.reason), (step, error.reason)
            until(lambda: look(target, opened) == before, step, state=lambda: f"{before}\n{look(target, opened)}")  # noqa: B023
            assert kept(redirects, files, mapped(target)), (step, redirects, mapped(target), files)
        goes_on(target)
        ends_well(target, step)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("python", "access"), TRIED)
def test_a_death_after_any_step_leaves_the_program_unharmed(
    python: str, access: str, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TargetMemory, "_opened", attach_steps.denied(access))
    for step, target in zip(steps_of(python, part)[0], targets(python), strict=False):
        before = status(target, SIGNALS)  # a thread of ours may wait for 10 s
        child = os.fork()
        if not child:
            try:
                attach_steps.attached(target.pid, attach_steps.dying_after(step))
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert target.ask("0") in (0, "0\n"), step
        assert status(target, SIGNALS) == before, step
        goes_on(target)
        ends_well(target, step)
