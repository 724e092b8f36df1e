"""Programs that fork beside an agent that they have started themselves."""

import sys

import pytest
from support.agent.python_child import run_python

PROGRAM = """
import os, sys, _thread, time, warnings
import kineto_agent
before = list(warnings.filters)
for _ in range(int(sys.argv[1])):
    lock = _thread.allocate_lock()
    lock.acquire()
    _thread.start_new_thread(lock.acquire, ())
kineto_agent.start()
threads = sys.modules["kineto_agent.system.threads"]
while threads._unnamed or threads.others(100) != 1 + int(sys.argv[1]):  # one that gets its name now counts for none
    time.sleep(0.001)
for _ in range(3):
    child = os.fork()
    if not child:
        os._exit(warnings.filters != before)
    assert os.waitpid(child, 0)[1] == 0
kineto_agent.stop()
assert warnings.filters == before
"""


@pytest.mark.parametrize("threads", [0, 1])
@pytest.mark.parametrize("action", ["always", "error"])
def test_a_program_is_warned_of_its_own_threads_alone(threads: int, action: str) -> None:
    ran = run_python(["-W", action, "-c", PROGRAM, str(threads)])
    if threads == 0 or sys.version_info < (3, 12):
        assert (ran.returncode, ran.stderr) == (0, "")
    elif action == "always":
        assert (ran.returncode, ran.stderr.count("is multi-threaded")) == (0, 3)
    else:  # what that makes of the warning is the interpreter's: up to 3.14 it is lost
        assert ran.stderr.count("is multi-threaded") == (sys.version_info >= (3, 15))


ASKED = """
import warnings
from kineto_agent.system import fork_warnings as ours
ours._list["in"] = "filters"  # as on the Pythons that warn
for message, taken in (("another", False), ("This process (pid=1) is multi-threaded, use of fork() may", True)):
    warnings.filters.insert(0, ours._FILTER)
    print(ours._FILTER[1].match(message) == taken == (ours._FILTER not in warnings.filters))
"""


def test_a_filter_is_taken_away_by_the_warning_that_it_is_for() -> None:
    assert run_python(["-c", ASKED]).stdout == "True\nTrue\n"
