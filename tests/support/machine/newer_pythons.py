"""CPython releases newer than this machine's, for tests:
`python -m support.machine.newer_pythons` in tests/ makes them.

Theory of operation
    The packages come from the unstable suite of the Debian mirror that this machine's apt already uses, by apt with
    a configuration, lists and cache of its own, and are unpacked (never installed) below one folder. Nothing outside
    of it changes, and no rights are needed.

    Such a Python needs a newer C library than the machine has, which lies in the same folder. So it runs in two ways:
    with the folder as its root file system (that is how tests get a container with another Python and another libc;
    Debian's executable is static and not position-independent), or in place: a main program compiled here that uses
    the folder's shared libpython, with the folder's loader and library path.
"""

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Iterator, List, Optional

REPOSITORY = Path(__file__).resolve().parents[3]
FOLDER = REPOSITORY / "build" / "newer-pythons"
ROOT = FOLDER / "root"
VERSIONS = ("3.14", "3.15")
SUITE = "sid"
MAKE = "make newer-pythons"  # what a skipped test tells the reader to do
APT_TIMEOUT_S = 300


def find(version: str) -> Optional[Path]:
    """The executable of e.g. "3.14" that runs in place; None where it has not been made or does not run."""
    executable = ROOT / "usr" / "local" / "bin" / f"python{version}"
    if not executable.exists():
        return None
    ran = subprocess.run([executable, "-c", "import ctypes, socket"], capture_output=True, timeout=60, check=False)
    return executable if ran.returncode == 0 else None


def find_root(version: str) -> Optional[Path]:
    """A folder to be used as root file system, with this version at /usr/bin/pythonX.Y; None without it."""
    return ROOT if (ROOT / "usr" / "bin" / f"python{version}").exists() else None


def mirror(etc_apt: Path = Path("/etc/apt")) -> str:
    """The address of the Debian archive in apt's sources. Raises RuntimeError where there is none."""
    for text in _sources(etc_apt):
        found = re.search(r"^(?:URIs:|deb\s+(?:\[[^\]]*\]\s+)?)\s*(\S+/debian)/?(?:\s|$)", text, re.MULTILINE)
        if found:
            return found[1]
    raise RuntimeError(f"{etc_apt} names no Debian archive: newer Pythons cannot be had here")


def _sources(etc_apt: Path) -> Iterator[str]:
    files = sorted((etc_apt / "sources.list.d").glob("*.sources")) + [etc_apt / "sources.list"]
    files += sorted((etc_apt / "sources.list.d").glob("*.list"))
    for file in files:
        if file.is_file():
            yield file.read_text()


class _Apt:
    """apt with all its files below one folder."""

    def __init__(self, folder: Path, source: str) -> None:
        self._archives = folder / "cache" / "archives"
        for made in (folder / "etc" / "parts", folder / "state" / "lists" / "partial", self._archives / "partial"):
            made.mkdir(parents=True, exist_ok=True)
        (folder / "state" / "status").touch()  # nothing is installed: every dependency is fetched
        keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
        (folder / "etc" / "debian.sources").write_text(
            f"Types: deb\nURIs: {source}\nSuites: {SUITE}\nComponents: main\nSigned-By: {keyring}\n"
        )
        settings = {
            "Dir::Etc::sourcelist": folder / "etc" / "debian.sources",
            "Dir::Etc::sourceparts": folder / "etc" / "parts",
            "Dir::Etc::preferences": folder / "etc" / "none",
            "Dir::Etc::preferencesparts": folder / "etc" / "parts",
            "Dir::State": folder / "state",
            "Dir::State::status": folder / "state" / "status",
            "Dir::Cache": folder / "cache",
            "Acquire::Languages": "none",
            "Binary::apt-get::APT::Keep-Downloaded-Packages": "true",
            "APT::Sandbox::User": "",
        }
        self._options = [part for key, value in settings.items() for part in ("-o", f"{key}={value}")]

    def has(self, package: str) -> bool:
        """Whether the suite has the package."""
        return _run(["apt-cache", *self._options, "show", package], check=False) == 0

    def update(self) -> None:
        """Fetch the suite's list of packages."""
        _run(["apt-get", *self._options, "-q", "update"])

    def fetch(self, packages: List[str]) -> List[Path]:
        """Fetch the packages and all that they depend on."""
        wanted = ["install", "--no-install-recommends", "--download-only", "-y", "-q", *packages]
        _run(["apt-get", *self._options, *wanted])
        return sorted(self._archives.glob("*.deb"))


def _run(command: List[str], *, check: bool = True) -> int:
    done = subprocess.run(command, capture_output=True, text=True, timeout=APT_TIMEOUT_S, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.returncode


def _unpack(packages: List[Path], root: Path) -> None:
    # Debian's packages expect the merged /usr, which is made by the package base-files.
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    for name in ("tmp", "proc", "dev", "etc", "var/tmp", "run"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    for package in packages:
        _run(["dpkg-deb", "--extract", str(package), str(root)])


def _compile_in_place(root: Path, versions: List[str]) -> None:
    """Compile main programs that name the folder's loader and libraries."""
    libraries = root / "usr" / "lib" / f"{platform.machine()}-linux-gnu"
    loader = next(libraries.glob("ld-linux-*.so.*"))
    programs = root / "usr" / "local" / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    source = programs / "main.c"
    source.write_text("int Py_BytesMain(int, char **);\nint main(int c, char **v) { return Py_BytesMain(c, v); }\n")
    for version in versions:
        libpython = next(libraries.glob(f"libpython{version}.so.*"))
        link = [f"-Wl,--dynamic-linker={loader}", f"-Wl,-rpath,{libraries}", "-Wl,--disable-new-dtags"]
        link += ["-Wl,--allow-shlib-undefined"]  # the linker would look for libpython's own needs on this machine
        _run(["cc", "-o", str(programs / f"python{version}"), str(source), str(libpython), *link])


def make(folder: Path = FOLDER) -> List[str]:
    """Make all of them anew. Returns the versions. Raises RuntimeError with the message of apt or dpkg."""
    shutil.rmtree(folder, ignore_errors=True)
    apt = _Apt(folder / "apt", mirror())
    apt.update()
    versions = [version for version in VERSIONS if apt.has(f"python{version}")]
    packages = apt.fetch([name + version for version in versions for name in ("python", "libpython")])
    _unpack(packages, folder / "root")
    _compile_in_place(folder / "root", versions)
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
