import contextlib
import os
import random
import select
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from kinetod.attach.attach_types import AttachError, Deadline
from kinetod.attach.inject.ptrace import StoppedThread
from kinetod.attach.inspect.target_image import TargetImage
from kinetod.attach.inspect.target_memory import TargetMemory
from kinetod.attach.methods.native_thread import NativeThread
from kinetod.attach.methods.pending_call import PendingCall
from support.targets.engine_target import EngineTarget, engine_target, needs_ptrace

pytestmark = [pytest.mark.slow, needs_ptrace]
SECONDS = 10.0
RANDOM_KILLS = 50  # on each of two targets


def in_child(work: Callable[[], None]) -> int:
    """Runs it in a forked process; gives the process's id."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def kill_randomly(target: EngineTarget, moments: random.Random) -> None:
    """SIGKILL to a process that hands over again and again, at a random moment of its work."""
    ready, told = os.pipe()

    def work() -> None:
        os.write(told, b"x")
        while True:
            with contextlib.suppress(AttachError):  # 60 of them have filled the queue
                PendingCall().hand_over(TargetImage(target.pid), target.bootstrap(), Deadline(SECONDS))

    child = in_child(work)
    os.read(ready, 1)
    select.select([], [], [], moments.uniform(0.0, 0.02))  # the moment is the point of the test
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(ready)
    os.close(told)


@pytest.mark.parametrize("kind", ["malloc", "malloc bystander"])
def test_a_helper_killed_at_random_moments_never_harms_the_target(tmp_path: Path, kind: str) -> None:
    moments = random.Random(3)
    with engine_target(tmp_path, kind) as target:
        for _kill in range(RANDOM_KILLS):
            kill_randomly(target, moments)
            assert target.process.poll() is None, target.state()
        before = target.mark.stat().st_size
        PendingCall().hand_over(TargetImage(target.pid), target.bootstrap(), Deadline(SECONDS))
        target.until_marked(before + 1)
        report = target.finish()
    assert report["mask"] == 0
    assert report["rounds"] > 0


STEPS = {
    "the thread stands": (StoppedThread, "__enter__"),
    "its registers are known": (StoppedThread, "registers"),
    "its signal mask is known": (StoppedThread, "signal_mask"),
    "something is written": (TargetMemory, "write"),
    "its registers are set": (StoppedThread, "set_registers"),
    "its signals are blocked": (StoppedThread, "set_signal_mask"),
    "it is let go": (StoppedThread, "__exit__"),
}
METHODS = (PendingCall(), NativeThread())


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("kind", ["malloc", "bystander"])
def test_a_helper_killed_right_after_any_step_never_harms_the_target(
    tmp_path: Path, kind: str, method: PendingCall | NativeThread
) -> None:
    with engine_target(tmp_path, kind) as target:
        for owner, name in STEPS.values():
            original = getattr(owner, name)

            def work(owner: type = owner, name: str = name, original: Callable[..., object] = original) -> None:

                def then_die(*arguments: object) -> object:
                    original(*arguments)
                    os.kill(os.getpid(), signal.SIGKILL)
                    return None

                setattr(owner, name, then_die)
                method.hand_over(TargetImage(target.pid), target.bootstrap(), Deadline(SECONDS))

            _pid, status = os.waitpid(in_child(work), 0)
            assert os.WIFSIGNALED(status), name
            assert target.process.poll() is None, name
        before = target.mark.stat().st_size
        method.hand_over(TargetImage(target.pid), target.bootstrap(), Deadline(SECONDS))
        target.until_marked(before + 1)
        report = target.finish()
    assert report["mask"] == 0
