"""Programs that fork while a live attach goes on, and afterwards, under every Python of this machine."""

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from kinetod.attach.channel import bootstrap
from support.machine.descriptors import open_files
from support.targets.live_target import LiveTarget, Start
from support.waiting import until

FORK = "pid = os.fork()\nwhile pid == 0: import signal; signal.pause()"


@pytest.fixture
def forked(target: LiveTarget) -> Iterator[Callable[[], int]]:
    children: list[int] = []

    def fork() -> int:
        target.do(FORK)
        children.append(target.ask("pid"))
        return children[-1]

    yield fork
    for child in children:
        os.kill(child, signal.SIGKILL)


def open_in(pid: int) -> set[str]:
    return {name for name in open_files(pid).values() if not name.startswith("/proc/")}  # a thread had just opened it


def test_a_forked_child_has_nothing_of_the_agent(target: LiveTarget, forked: Callable[[], int]) -> None:
    before = open_in(target.pid)
    connection, _hello = target.welcome()
    connection.collect()
    child = forked()
    until(lambda: open_in(child) == before, "the child has closed the agent's descriptors")
    os.kill(target.pid, signal.SIGKILL)
    connection.expect_end()  # although the child lives


def test_a_fork_before_the_agent_has_come_keeps_no_channel(target: LiveTarget, forked: Callable[[], int]) -> None:
    before = open_in(target.pid)
    boot = bootstrap.make(time.time_ns())
    target.run(boot)
    target.channel(boot)
    child = forked()
    until(lambda: open_in(child) == before, "the child has closed the channel")


FORK_AND_LOOK = (  # the child's status says whether it finds the filters changed
    "before = list(warnings.filters)\nchild = os.fork()\nif not child: os._exit(warnings.filters != before)\n"
    "result = os.waitpid(child, 0)[1], warnings.filters == before"
)


def test_a_program_of_one_thread_that_forks_is_not_warned_of_ours(start: Start) -> None:
    target = start("-W", "always")
    target.do("import os, sys, warnings")
    boot = bootstrap.make(time.time_ns())
    target.run(boot)
    target.channel(boot)
    target.do(FORK_AND_LOOK)  # before the agent has come
    assert target.ask("result") == [0, True]
    for _ in range(2):  # the second ends the first, which must not take the filter along
        connection, _hello = target.welcome()
        connection.collect()
        target.do(FORK_AND_LOOK)
        assert target.ask("result") == [0, True]
    connection.close()
    assert target.end() == (0, "")


def test_a_program_of_two_threads_that_forks_is_warned_as_ever(start: Start) -> None:
    target = start("-W", "always")
    target.do("import os, sys, warnings, _thread")
    target.do("lock = _thread.allocate_lock(); lock.acquire(); _thread.start_new_thread(lock.acquire, ())")
    connection, _hello = target.welcome()
    target.do(FORK_AND_LOOK)
    connection.close()
    until(lambda: target.threads() == 2, "the agent has left")
    assert target.ask("warnings.filters == before")
    warns = target.ask("sys.version_info >= (3, 12)")
    status, said = target.end()
    assert (status, said.count("is multi-threaded")) == (0, int(warns))
