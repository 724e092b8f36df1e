"""The moment without GPU work that CUPTI's first and last call wait for, against a driver built as the real one."""

import platform
import subprocess

import pytest
from support.machine import native
from support.machine.sanitize import DRIVERS

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the fake driver is built as the one for x86-64")

_FACTS = {
    "unused": "a program that does not use CUDA is not waited for",
    "idle": "an idle GPU is the moment",
    "steady": "a loop that keeps 60 ms queued does not keep CUPTI out",
    "never": "work that does not end keeps CUPTI out, until it has ended",
    "noted": "a capture that is noted is not ended",
    "blocking": "a capture on a blocking stream, begun before, is not ended",
    "given": "a capture on a stream of torch's, begun before, is not ended",
    "wrong_thread": "an end that fails leaves the capture in progress",
    "hammer": "captures that begin in the moment are not ended",
    "another_in_between": "who came after us and leads on to us is not led on to",
    "blocked": "a driver that does not answer is asked again, by one thread",
    "starved": "a driver that launches keep busy answers once they pause, also after captures had time to end",
    "starved_later": "so it does after another thread has kept it from answering",
    "hurry": "who hurries ends the wait",
    "forks": "the captures and launches of a forked child do not wait",
    "no_thread": "without a thread it is not known",
    "held": "launches are held in the moment, with their arguments",
    "held_and_refused": "launches go on when CUPTI has refused",
    "held_and_given_up": "launches go on when nobody wants the moment any more",
    "crowd": "64 threads that launch without a pause do not keep CUPTI out, and share one note of their context",
    "pauses": "pauses of launches grow while a crowd waits, and end with one of 320 ms in vain",
    "call_in_a_crowd": "CUPTI's first call has a hold of its own after a pause of launches for another call",
    "detach": "a detach waits for the moment, or for a later capture",
    "beside_primary": "work in a context of cuCtxCreate that does not end keeps CUPTI out",
    "without_primary": "so it does where there is no other context",
    "destroyed": "a context that the program destroys is not used any more",
    "call_stands": "a first call of CUPTI that does not return keeps nobody waiting",
    "call_fails": "a first call of CUPTI that fails, then or later, is not the last that has to wait",
    "among_launches": "the first and the last call get the lock that launches share",
    "detach_beside_another": "a detach waits for contexts into which the program launched, too",
    "old": "a driver before CUDA 12.5 cannot be asked",
}


@pytest.mark.parametrize("scenario", _FACTS, ids=lambda name: _FACTS[name])
def test_in_the_search_for_a_moment(scenario: str) -> None:
    flags = ["-g", *native.COLLECTOR_HEADERS, f"-I{native.FAKES / 'driver'}"]
    driver = native.build("drive_drain", [*native.collector_sources(), DRIVERS / "drive_drain.c"], flags)
    libraries = [native.fake_driver(old=scenario == "old"), native.fake_cupti()]
    done = subprocess.run([driver, *libraries, scenario], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
