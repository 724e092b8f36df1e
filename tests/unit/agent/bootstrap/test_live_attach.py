"""The agent of a live attach and the one after it, in a process that keeps the modules."""

import pytest
from support.agent.python_child import run_python

TWO_AGENTS = """
import _socket, sys, threading
from kineto_agent.bootstrap import live_attach
entered, leave = threading.Event(), threading.Event()
def sources():
    entered.set()
    assert leave.wait(30)
    return []
live_attach.registry.sources = sources
def attach():
    theirs, ours = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    work = live_attach.run(_socket.socket(fileno=ours.detach()), -1, 1, 0)
    thread = threading.Thread(target=work)
    thread.start()
    return theirs, thread
theirs, first = attach()
assert entered.wait(30)
theirs.close()
live_attach.end()  # it does not end in time
try:
    attach()
except OSError as error:
    print(error)
leave.set()
first.join()
theirs, second = attach()
print(theirs.recv(1) == live_attach.READY, live_attach._agent is not None)
theirs.close()
second.join()
print(live_attach._agent)
"""


@pytest.mark.slow
def test_an_agent_begins_only_once_that_of_the_attach_before_has_ended() -> None:
    ran = run_python(["-c", TWO_AGENTS])
    assert (ran.stdout.splitlines(), ran.stderr) == (
        [
            "[Errno 16] the agent of an earlier attach is still running and may be writing what it recorded",
            "True True",
            "None",
        ],
        "",
    )
