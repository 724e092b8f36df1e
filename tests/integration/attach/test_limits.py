"""Targets at their limits, and such that stand still at times: refused with the true reason at once, never harmed."""

import subprocess
import sys
import time

import pytest
from campaign.attach_targets.limits import NEEDS
from campaign.parts.attach_harness import DEADLINE_S, RunningTarget, campaign, table
from support.machine.cgroups import ROOT
from support.targets.attachers import HelperAttacher
from support.waiting import scaled

pytestmark = pytest.mark.slow

NEEDS_MORE = "an attach with a small trace needs "
AT_ONCE_S = DEADLINE_S / 2  # who waited for anything in the target would wait until the deadline
REFUSED = {
    "few_addresses": "32 MiB left within its RLIMIT_AS limit",
    "few_threads": "within pids.max (2) of the control group /kineto-target-PID; "
    + NEEDS_MORE
    + "8 threads; raise that limit",
    "few_descriptors": "6 descriptors left within its RLIMIT_NOFILE limit of 12; " + NEEDS_MORE + "16 descriptors",
}


def needs(kind: str) -> None:
    controller = {"freezing_v2": "unified", "freezing_v1": "freezer", "near_oom": "memory"}.get(kind, "pids")
    if kind in NEEDS and not (ROOT / controller / "cgroup.procs").exists():
        pytest.skip(f"no control groups of {controller} here")


@pytest.mark.parametrize("kind", ["in_kernel", "stopping", "freezing_v1", "freezing_v2", "near_oom"])
def test_target_that_stands_still_at_times_is_not_harmed(kind: str, attacher: HelperAttacher) -> None:
    needs(kind)
    row = campaign(kind, attacher, 4)
    assert row.harmless, table([row])
    if kind in ("in_kernel", "near_oom"):
        assert row.count("success") == 4, table([row])


@pytest.mark.parametrize("kind", REFUSED)
def test_target_at_a_limit_is_refused_at_once_and_is_as_it_was(kind: str, attacher: HelperAttacher) -> None:
    needs(kind)
    with RunningTarget(kind) as target:
        target.wait_ready()
        held = target.held()
        begin = time.monotonic()
        attempt = attacher.attach(target.pid)
        assert time.monotonic() - begin < scaled(AT_ONCE_S)
        assert attempt.outcome == "refused"
        assert attempt.reason.startswith("ATTACH_LIMIT: process PID (python")
        assert REFUSED[kind] in attempt.reason
        assert target.held() == held
        assert target.finish() == []


def test_the_advice_for_more_descriptors_is_right(attacher: HelperAttacher) -> None:
    program = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (10, 4096))\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        advice = attacher.attach(process.pid).reason.split("`")[1].replace("PID", str(process.pid))
        subprocess.run(advice.split(), check=True)
        assert attacher.attach(process.pid).outcome == "success"
