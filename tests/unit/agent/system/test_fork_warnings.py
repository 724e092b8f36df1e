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
others = sys.modules["kineto_agent.system.threads"].others
while others(100) != 1 + int(sys.argv[1]):  # they name themselves
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
