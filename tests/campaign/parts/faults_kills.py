"""One random moment of captures under load at which something is killed with SIGKILL."""

import contextlib
import os
import random
import signal
import threading
import time

import psutil
from campaign.parts.faults import PLAIN_WORK, Grounds, Site
from support.service import subjects
from support.targets.programs import ready_pids
from support.waiting import until

LONGEST_S = 1.2  # a capture of 300 ms is stored by then
LONGEST_ATTACH_S = 0.25
HELPER_REASONS = frozenset({"ATTACH_FAILED"})
BUSY = frozenset({"BUSY"})  # an agent still ends what it recorded for a capture that is over


def pause(seconds: float) -> None:
    """Waits until the random moment of the kill."""
    threading.Event().wait(seconds)


def kill_daemon(site: Site, chance: random.Random) -> None:
    """Kills the daemon itself, also while it answers the request for a capture."""
    first, *others = sorted(site.pids())
    asking = site.begin_in_background(first)
    site.begin(*others)
    pause(chance.uniform(0, LONGEST_S))
    died, killed_ns = site.kill_daemon()
    asking.join()
    site.serves_again(died)
    captures = site.settle(Grounds(daemon_killed_ns=killed_ns, refusals=BUSY))
    site.tally.hits += any("DAEMON_RESTARTED" in str(capture) for capture in captures)


def kill_target(site: Site, chance: random.Random) -> None:
    """Kills one of the processes that are traced."""
    victim = chance.choice(site.agents)
    site.begin(*site.pids())
    pause(chance.uniform(0, LONGEST_S))
    pid, died = victim.pid, time.monotonic()
    site.remove_agent(victim)
    killed_ns = time.time_ns()
    site.serves_again(died)
    captures = site.settle(Grounds(killed_ns={pid: killed_ns}))
    site.tally.hits += any(target.reason_code for capture in captures for target in capture.targets)
    site.add_agent()
    site.serves_again(time.monotonic())


def kill_worker(site: Site, chance: random.Random) -> None:
    """Kills a decode worker, at work or not; another one repeats its work."""
    crashes = site.daemon.log().count("crashed its worker")
    site.begin(*site.pids())
    pause(chance.uniform(0.2, LONGEST_S))
    kill(chance.choice(until(lambda: site.children("kinetod.captures.result.decode_worker"), "there is a worker")))
    site.serves_again(time.monotonic())
    site.settle(Grounds())
    site.tally.hits += site.daemon.log().count("crashed its worker") > crashes


def kill_helper(site: Site, chance: random.Random) -> None:
    """Kills all attach helpers while an agent is attached to a process, which must survive."""
    crashes = site.daemon.log().count("crashed its helper")
    plain = site.add_agent(PLAIN_WORK)
    site.agents.remove(plain)  # it has no agent
    try:
        agents = site.pids()
        site.begin(*agents)
        asking = site.begin_in_background(plain.pid)
        pause(chance.uniform(0, LONGEST_ATTACH_S))
        kill(*site.children("kinetod.attach_helper.attach_worker"))
        asking.join()
        site.serves_again(time.monotonic())
        site.settle(Grounds(reasons_of={plain.pid: HELPER_REASONS}))
        site.forget()
        until(lambda: plain.pid not in ready_pids(site.daemon.stub()), "its agent has left")
        site.begin(plain.pid)  # and again, undisturbed: a helper is asked, and those that were killed are replaced
        site.settle(Grounds())
        assert plain.poll() is None
    finally:
        site.agents.append(plain)
        site.remove_agent(plain)
    site.tally.moments -= 1  # settled twice
    site.tally.hits += site.daemon.log().count("crashed its helper") > crashes


def kill(*processes: psutil.Process) -> None:
    """Kills the processes and waits until they have ended: on busy cores, a killed one seems alive for a while."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        until(lambda pid=process.pid: subjects.state(pid) in ("", "Z"), "it has ended")  # type: ignore[misc]


KILLS = {"daemon": kill_daemon, "target": kill_target, "decode worker": kill_worker, "attach helper": kill_helper}
