"""The fake libcupti of PM sampling (tests/fakes/fake_pm_sampling.c) as a host has it: libraries, a plan, a log."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kinetod.counters.counter_client import CountersChild
from kinetod.counters.cupti_backend import CuptiBackend

from support.machine import native
from support.waiting import scaled

UUID = "GPU-fa000000-0000-0000-0000-00000000000{}"
# kinetod-counters that takes no thread that is late for a driver that hangs.
_PATIENT = f"""
import sys
from kinetod.counters import __main__, sampler_server
sampler_server.STOP_S = {scaled(20)}
sys.exit(__main__.main())
"""
PATIENT_COMMAND = (sys.executable, "-P", "-c", _PATIENT, "--parent")


class FakePmSampling:
    """A folder with a libcupti and a libcuda of its own, so that what the fake counts begins anew."""

    def __init__(self, folder: Path) -> None:
        flags = ["-O2", "-g", "-fPIC", "-shared"]
        built = native.build("libfake_pm_sampling.so", [native.FAKES / "fake_pm_sampling.c"], flags)
        self.folder = folder
        self.library = folder / "libcupti.so.13"
        shutil.copy(built, self.library)
        (folder / "libcuda.so.1").symlink_to(self.library)
        # What a test's own process loads has no driver's name: the agent's tests would find it in that process.
        self.driver = folder / "libfake_driver.so"
        self.driver.symlink_to(self.library)
        self._plan = folder / "plan"
        self._log = folder / "log"
        self.environ = {
            "FAKE_PM_PLAN": str(self._plan),
            "FAKE_PM_LOG": str(self._log),
            "LD_LIBRARY_PATH": str(folder),  # where kinetod-counters finds libcuda.so.1
        }
        self.play()

    def play(self, *lines: str) -> None:
        """Replaces the plan: see the fake's head. From the next call on."""
        scratch = self._plan.with_suffix(".new")
        scratch.write_text(
            "".join(f"{line}\n" for line in (*lines, "version=130001", "gpus=2"))
        )  # the first one counts
        scratch.replace(self._plan)

    def calls(self) -> list[str]:
        """The functions that were called."""
        return [line.split()[0] for line in self._lines() if "WRONG" not in line]

    def wrong(self) -> list[str]:
        """What was called out of order or with the wrong sizes."""
        return [line for line in self._lines() if "WRONG" in line]

    def _lines(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def backend(self, proc: Path = Path("/proc")) -> CuptiBackend:
        """A backend in this process, which must have `environ`."""
        return CuptiBackend(str(self.library), cuda=str(self.driver), proc=proc)

    def child(self) -> CountersChild:
        """A kinetod-counters, started when somebody connects; this process must have `environ`."""
        return CountersChild(("--library", str(self.library)), command=PATIENT_COMMAND)


@contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables of this process, which C reads, too."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
