"""Intel's real tracing library without an Intel GPU, for tests:
`python -m support.xpu.level_zero` in tests/ makes it.

Theory of operation
    Three parts lie in build/level-zero. The Level Zero loader and its tracing layer are Debian's, with a C library and
    a Python of the same suite, because they are newer than this machine's (debian_packages.py). Intel's libpti_view is
    from PyPI, one folder for each version. The driver is a fake (tests/fakes/level_zero), which the real loader loads
    through ZE_ENABLE_ALT_DRIVERS and which keeps a log of its own of all that was launched.

    Versions before 1.0 look for their core by its bare name, so a program's LD_LIBRARY_PATH has the version's folder.
"""

import fcntl
import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence

import pytest

from support.machine import native
from support.packages import debian_packages

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / "build" / "level-zero"
SOURCES = REPOSITORY / "tests" / "fakes" / "level_zero"
APP = SOURCES / "level_zero_app.py"
SUITE = "trixie"
PYTHON = "3.13"
PACKAGES = ("libze1", "libze-dev", f"python{PYTHON}", f"libpython{PYTHON}")
VERSIONS = ("0.12.4", "0.17.0", "1.0.1", "1.1.0", "1.2.0")  # of intel-pti
RECORDED = VERSIONS[1:]  # those before 0.14 are refused
# libxptifw, which all need, and what the versions before 1.1 need beside it.
RUNTIME = "intel-cmplr-lib-rt"
RUNTIME_LIBRARIES = ("libxptifw.so", "libsvml.so", "libirng.so", "libimf.so", "libintlc.so.5")
MAKE = "make level-zero"  # what a skipped test tells the reader to do
DOWNLOAD_TIMEOUT_S = 300

_COMPLETE = "complete.json"
_LOG_HEAD = struct.Struct("<QQQ40x")  # struct fake_log
_LOG_ENTRY = struct.Struct("<QQQQIIII80s")  # struct fake_entry
KERNEL, COPY, FILL = 1, 2, 3  # fake_entry_kind


class Launched(NamedTuple):
    """One thing that the fake driver ran, as it says itself. Times are CLOCK_MONOTONIC_RAW, but for unix_ns."""

    start: int
    end: int
    unix_ns: int  # CLOCK_REALTIME at `start`
    bytes: int
    kind: int  # KERNEL, COPY, FILL
    thread: int
    device: int
    name: str


def read_log(path: Path) -> List[Launched]:
    """All that was launched so far. Raises AssertionError if the log was too small."""
    data = path.read_bytes()
    count, capacity, _ = _LOG_HEAD.unpack_from(data)
    assert count <= capacity, f"the fake driver's log holds {capacity} entries and {count} came"
    found = []
    for at in range(count):
        entry = _LOG_ENTRY.unpack_from(data, _LOG_HEAD.size + at * _LOG_ENTRY.size)
        start, end, unix_ns, size, kind, thread, device, complete, name = entry
        assert complete, "an entry of the fake driver's log is being written"
        text = name.split(b"\0", 1)[0].decode()
        found.append(Launched(start, end, unix_ns, size, kind, thread, device, text))
    return found


def clock_reads(path: Path) -> int:
    """How often the clock of a GPU was read so far: PTI does so at each piece of work that it traces."""
    return int(_LOG_HEAD.unpack_from(path.read_bytes())[2])


class LevelZero(NamedTuple):
    """One version of libpti_view with loader, driver and Python."""

    version: str
    folder: Path = FOLDER

    @property
    def python(self) -> Path:
        """The Python whose processes can use them."""
        return debian_packages.in_place(self.folder / "root", PYTHON)

    @property
    def libpti_view(self) -> Path:
        """The library, in a folder of its own."""
        return next((self.folder / "pti" / self.version).glob("libpti_view.so.*"))

    def environ(self, log: Path, *, entries: int = 65536, devices: int = 1, **more: str) -> Dict[str, str]:
        """Variables of a process that uses Level Zero. more: FAKE_LEVEL_ZERO_… (fake_driver.h) and any other."""
        return {
            "LD_LIBRARY_PATH": os.pathsep.join([str(self.libpti_view.parent), str(self.folder / "pti" / "runtime")]),
            "ZE_ENABLE_ALT_DRIVERS": str(driver()),
            "FAKE_LEVEL_ZERO_LOG": str(log),
            "FAKE_LEVEL_ZERO_ENTRIES": str(entries),
            "FAKE_LEVEL_ZERO_DEVICES": str(devices),
            "LEVEL_ZERO_PROGRAM": str(program()),
            "LEVEL_ZERO_KINETO": str(kineto()),
            "KINETO_PTI_LIBRARY": str(self.libpti_view),
            **more,
        }


def driver() -> Path:
    """The fake driver. Functions that do nothing leave their parameters unused."""
    flags = ["-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-unused-parameter", *_headers()]
    return native.build("libze_fake_gpu.so", [SOURCES / "fake_driver.c", SOURCES / "empty_tables.c"], flags)


def program() -> Path:
    """What uses Level Zero, as a library for ctypes."""
    loader = debian_packages.libraries(FOLDER / "root") / "libze_loader.so.1"
    linked = ["-Wl,--no-as-needed", str(loader), "-Wl,--allow-shlib-undefined"]  # its C library is newer than ours
    flags = ["-O2", "-g", "-fPIC", "-shared", *_headers(), *linked]
    return native.build("liblevel_zero_program.so", [SOURCES / "program.c"], flags)


def kineto() -> Path:
    """What uses libpti_view as PyTorch's profiler does, under the name of torch's library."""
    return native.build("libtorch_cpu.so", [SOURCES / "fake_xpupti.c"], ["-O2", "-g", "-fPIC", "-shared"])


def fence() -> Path:
    """What ends a process that uses a C++ object after it was deleted, for LD_PRELOAD."""
    return native.build("libfence.so", [SOURCES / "fence.c"], ["-O2", "-g", "-fPIC", "-shared"])


def _headers() -> List[str]:
    return ["-isystem", str(FOLDER / "root" / "usr" / "include")]


def required(version: str) -> LevelZero:
    """Everything for this version of intel-pti; skips the test where it has not been made."""
    if not is_made():
        pytest.skip(f"no Level Zero loader and libpti_view: {MAKE}")
    return LevelZero(version)


def is_made(folder: Path = FOLDER) -> bool:
    """Whether all parts are there, in the versions that this module names."""
    try:
        return bool(json.loads((folder / _COMPLETE).read_text()) == _parts())
    except (OSError, ValueError):
        return False


def _parts() -> Dict[str, object]:
    return {"suite": SUITE, "packages": list(PACKAGES), "versions": list(VERSIONS)}


def _pip_download(requirement: str, to: Path) -> Path:
    """The wheel of one distribution, by pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--dest", str(to), requirement],
        capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"pip cannot download {requirement}: {done.stderr.strip()[-500:]}")
    return next(to.glob("*.whl"))


def _unpack_libraries(wheel: Path, to: Path, wanted: Sequence[str]) -> None:
    """Put the libraries of a wheel whose paths below lib/ begin with one of these names into a folder."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            _, found, below = name.partition(".data/data/lib/")
            if found and below.startswith(tuple(wanted)):
                target = to / below
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))


def _make_pti(folder: Path) -> None:
    downloads = folder / "wheels"
    for version in VERSIONS:
        wheel = _pip_download(f"intel-pti=={version}", downloads / version)
        # The numbered name alone: a program that loaded libpti_view.so beside it would have two copies.
        wanted = (f"libpti_view.so.{version.partition('.')[0]}", "libpti.so", "pti/")
        _unpack_libraries(wheel, folder / "pti" / version, wanted)
        (folder / "pti" / version / f"libpti_view.so.{version}").unlink()
    _unpack_libraries(_pip_download(RUNTIME, downloads / "runtime"), folder / "pti" / "runtime", RUNTIME_LIBRARIES)
    shutil.rmtree(downloads)


def _make_root(folder: Path) -> None:
    apt = debian_packages.Apt(folder / "apt", debian_packages.mirror(), SUITE)
    apt.update()
    debian_packages.unpack(apt.fetch(PACKAGES), folder / "root")
    debian_packages.compile_in_place(folder / "root", [PYTHON])
    shutil.rmtree(folder / "apt")


def make(folder: Path = FOLDER) -> None:
    """Make all parts anew. Raises RuntimeError with the message of apt, dpkg or pip."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _make_root(folder)
    _make_pti(folder)
    (folder / _COMPLETE).write_text(json.dumps(_parts()))


def main() -> int:
    """Make what is missing. One process at a time."""
    FOLDER.parent.mkdir(exist_ok=True)
    with (FOLDER.parent / "level-zero.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_made():
            print(f"Level Zero and intel-pti {', '.join(VERSIONS)} are in {FOLDER}")
            return 0
        try:
            make()
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            print(f"no Level Zero: {error}", file=sys.stderr)
            return 1
        print(f"Level Zero and intel-pti {', '.join(VERSIONS)} in {FOLDER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
