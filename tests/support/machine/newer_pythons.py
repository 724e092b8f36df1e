"""CPython releases newer than this machine's, for tests:
`python -m support.machine.newer_pythons` in tests/ makes them.

Theory of operation
    The packages come from Debian's unstable suite (debian_packages.py). Such a Python runs with the folder as its root
    file system (that is how tests get a container with another Python and another libc), or in place.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import List, Optional

from support.packages import debian_packages

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / "build" / "newer-pythons"
ROOT = FOLDER / "root"
VERSIONS = ("3.14", "3.15")
SUITE = "sid"
MAKE = "make newer-pythons"  # what a skipped test tells the reader to do


def find(version: str) -> Optional[Path]:
    """The executable of e.g. "3.14" that runs in place; None where it has not been made or does not run."""
    executable = debian_packages.in_place(ROOT, version)
    if not executable.exists():
        return None
    ran = subprocess.run([executable, "-c", "import ctypes, socket"], capture_output=True, timeout=60, check=False)
    return executable if ran.returncode == 0 else None


def find_root(version: str) -> Optional[Path]:
    """A folder to be used as root file system, with this version at /usr/bin/pythonX.Y; None without it."""
    return ROOT if (ROOT / "usr" / "bin" / f"python{version}").exists() else None


def make(folder: Path = FOLDER) -> List[str]:
    """Make all of them anew. Returns the versions. Raises RuntimeError with the message of apt or dpkg."""
    shutil.rmtree(folder, ignore_errors=True)
    apt = debian_packages.Apt(folder / "apt", debian_packages.mirror(), SUITE)
    apt.update()
    versions = [version for version in VERSIONS if apt.has(f"python{version}")]
    packages = apt.fetch([name + version for version in versions for name in ("python", "libpython")])
    debian_packages.unpack(packages, folder / "root")
    debian_packages.compile_in_place(folder / "root", versions)
    shutil.rmtree(folder / "apt")
    return versions


def main() -> int:
    """Make the releases that are missing."""
    if all(find(version) for version in VERSIONS):
        print(f"Python {' and '.join(VERSIONS)} are there")
        return 0
    try:
        print(f"Python {' and '.join(make())} in {FOLDER}")
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        print(f"no newer Pythons: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
