"""A host with Intel GPUs: the fake Sysman (tests/fakes/level_zero/fake_sysman.c) and the file that steers it.

It is built against Intel's public headers, so it needs `make level-zero`; tests are skipped without.
"""

import os
from pathlib import Path

import pytest

from support.machine.native import build
from support.packages import debian_packages
from support.xpu import level_zero

LOADER = "libze_loader.so.1"


def headers() -> Path:
    """The folder with level_zero/zes_api.h; skips the test where it has not been made."""
    if not level_zero.is_made():
        pytest.skip(f"no headers of Level Zero: {level_zero.MAKE}")
    return level_zero.FOLDER / "root" / "usr" / "include"


def fake_loader() -> Path:
    """The fake as the loader itself, under the name that Intel installs."""
    flags = ["-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-Wl,-soname,{LOADER}", "-isystem", str(headers())]
    return build(LOADER, [level_zero.SOURCES / "fake_sysman.c"], flags)


def fake_driver() -> Path:
    """The fake as a driver library, for the real loader."""
    flags = ["-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-DAS_DRIVER", "-Wno-unused-parameter"]
    flags += ["-Wl,-Bsymbolic", "-isystem", str(headers())]
    sources = [level_zero.SOURCES / name for name in ("fake_sysman.c", "fake_driver.c", "empty_tables.c")]
    return build("libze_fake_sysman.so", sources, flags)


def real_loader() -> tuple[Path, Path]:
    """Debian's loader, and a Python that can load it."""
    headers()
    root = level_zero.FOLDER / "root"
    return debian_packages.libraries(root) / LOADER, debian_packages.in_place(root, level_zero.PYTHON)


class FakeIntelGpus:
    """What the GPUs of the processes with `environ` do. The keys are at the top of fake_sysman.c."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "fake-sysman"
        self.path.write_text("")
        inherited = os.environ.get("LD_LIBRARY_PATH")
        self.environ = {
            "FAKE_SYSMAN": str(self.path),
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(fake_loader().parent), inherited])),
        }

    def say(self, *lines: str) -> None:
        """Replaces what the file says, in one step."""
        scratch = self.path.with_suffix(".new")
        scratch.write_text("".join(f"{line}\n" for line in lines))
        scratch.replace(self.path)
