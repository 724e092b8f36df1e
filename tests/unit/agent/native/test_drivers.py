"""C programs that drive parts of the collector: alone, and under sanitizers."""

import os
import platform
import subprocess
from pathlib import Path

import pytest
from support.machine import native
from support.machine.native import DRIVERS, FAKES
from support.rocm import fakes as rocm

x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the fake driver is built as the one for x86-64")

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


@x86_64
@pytest.mark.parametrize("scenario", _FACTS, ids=lambda name: _FACTS[name])
def test_in_the_search_for_a_moment_without_gpu_work(scenario: str) -> None:
    flags = ["-g", *native.COLLECTOR_HEADERS, f"-I{FAKES / 'driver'}"]
    driver = native.build("drive_drain", [*native.collector_sources(), DRIVERS / "drive_drain.c"], flags)
    libraries = [native.fake_driver(old=scenario == "old"), native.fake_cupti()]
    done = subprocess.run([driver, *libraries, scenario], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


def test_no_forked_child_has_the_descriptor_of_an_arena() -> None:
    flags = ["-O2", *native.COLLECTOR_HEADERS, "-Wl,--wrap=fcntl,--wrap=close"]
    sources = [native.COLLECTOR / "common" / "arena.c", DRIVERS / "drive_arena.c"]
    done = subprocess.run([native.build("drive_arena", sources, flags)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "0 of 22 children, 0 left\n")


def _libraries(driver: str, flags: list[str]) -> list[Path]:
    """The fakes that this driver loads, compiled with these flags."""
    shared = [*flags, "-fPIC", "-shared"]
    cupti = native.build("libcupti.so.13", native.FAKE_CUPTI, shared)
    if driver == "drive_drain":
        return [native.fake_driver(*flags), cupti]
    if driver == "drive_kit":
        vendor, source = [*shared, *native.COLLECTOR_HEADERS], [FAKES / "fake_vendor.c"]
        pushes = native.build("libpushes.so", source, [*vendor, "-DFAKE_PUSHES"])
        return [native.build("liblends.so", source, vendor), pushes]
    if driver in ("drive_ops", "drive_graphs"):
        graphs = [FAKES / "fake_graph_driver.c"] if driver == "drive_graphs" else []
        return [native.build("libtorch_cpu.so", [FAKES / "fake_torch.c", *graphs], shared)]
    return [] if driver == "drive_stacks" else [cupti]


@pytest.mark.slow
@pytest.mark.timeout(900)  # of work that takes 40 s at most on a quiet machine
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
@pytest.mark.parametrize(
    "driver",
    [
        pytest.param("drive_drain", marks=x86_64), "drive_collector", "drive_cupti_gate", "drive_kit", "drive_ops",
        "drive_graphs", "drive_stacks", "drive_rocprofiler",
    ],
)  # fmt: skip
def test_under_a_sanitizer_the_collector_is_clean(driver: str, sanitizer: str) -> None:
    if not native.has_sanitizer(sanitizer):
        pytest.skip(f"this compiler has no -fsanitize={sanitizer}")
    flags = ["-O1", "-g", "-fno-omit-frame-pointer", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    if driver == "drive_rocprofiler":
        for version in rocm.VERSIONS:
            recorded = rocm.drive(flags, version, launches=4000, cycles=5)
            assert recorded.returncode == 0, f"version {version}: {recorded.stderr}"
        return
    sources = [*native.collector_sources(), DRIVERS / f"{driver}.c"]
    headers = [*native.COLLECTOR_HEADERS, f"-I{FAKES}", f"-I{FAKES / 'driver'}"]
    program = [native.build(driver, sources, [*flags, *headers]), *_libraries(driver, flags)]
    done = subprocess.run(program, env=os.environ | native.SANITIZED, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
