"""Debian packages of any suite, fetched and unpacked below one folder without root, for tests.

Theory of operation
    apt runs with a configuration, lists and cache of its own, and takes the archive that this machine's apt already
    uses. The packages are unpacked, never installed. Nothing outside of the folder changes.

    What is unpacked needs a newer C library than the machine has, which lies in the same folder. So a Python from there
    runs in two ways: with the folder as its root file system (Debian's executable is static and not
    position-independent), or in place: a main program compiled here that uses the folder's shared libpython, with the
    folder's loader and library path.
"""

import platform
import re
import subprocess
from pathlib import Path
from typing import Iterator, List, Sequence

APT_TIMEOUT_S = 300


def mirror(etc_apt: Path = Path("/etc/apt")) -> str:
    """The address of the Debian archive in apt's sources. Raises RuntimeError where there is none."""
    for text in _sources(etc_apt):
        found = re.search(r"^(?:URIs:|deb\s+(?:\[[^\]]*\]\s+)?)\s*(\S+/debian)/?(?:\s|$)", text, re.MULTILINE)
        if found:
            return found[1]
    raise RuntimeError(f"{etc_apt} names no Debian archive: its packages cannot be had here")


def _sources(etc_apt: Path) -> Iterator[str]:
    files = sorted((etc_apt / "sources.list.d").glob("*.sources")) + [etc_apt / "sources.list"]
    files += sorted((etc_apt / "sources.list.d").glob("*.list"))
    for file in files:
        if file.is_file():
            yield file.read_text()


class Apt:
    """apt with all its files below one folder, for one suite of the archive."""

    def __init__(self, folder: Path, source: str, suite: str) -> None:
        self._archives = folder / "cache" / "archives"
        for made in (folder / "etc" / "parts", folder / "state" / "lists" / "partial", self._archives / "partial"):
            made.mkdir(parents=True, exist_ok=True)
        (folder / "state" / "status").touch()  # nothing is installed: every dependency is fetched
        keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
        (folder / "etc" / "debian.sources").write_text(
            f"Types: deb\nURIs: {source}\nSuites: {suite}\nComponents: main\nSigned-By: {keyring}\n"
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
        return run(["apt-cache", *self._options, "show", package], check=False) == 0

    def update(self) -> None:
        """Fetch the suite's list of packages."""
        run(["apt-get", *self._options, "-q", "update"])

    def fetch(self, packages: Sequence[str]) -> List[Path]:
        """Fetch the packages and all that they depend on."""
        wanted = ["install", "--no-install-recommends", "--download-only", "-y", "-q", *packages]
        run(["apt-get", *self._options, *wanted])
        return sorted(self._archives.glob("*.deb"))


def run(command: Sequence[str], *, check: bool = True) -> int:
    """The exit status of a command. Raises RuntimeError with the end of its output if it failed and that matters."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=APT_TIMEOUT_S, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return done.returncode


def unpack(packages: Sequence[Path], root: Path) -> None:
    """Unpack the packages into a root file system with the merged /usr, which the package base-files would make."""
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    for name in ("tmp", "proc", "dev", "etc", "var/tmp", "run"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    for package in packages:
        run(["dpkg-deb", "--extract", str(package), str(root)])


def libraries(root: Path) -> Path:
    """The folder of the root's shared libraries."""
    return root / "usr" / "lib" / f"{platform.machine()}-linux-gnu"


def in_place(root: Path, version: str) -> Path:
    """Where compile_in_place puts the executable of e.g. "3.14"."""
    return root / "usr" / "local" / "bin" / f"python{version}"


def compile_in_place(root: Path, versions: Sequence[str]) -> None:
    """Compile main programs of Python that name the folder's loader and libraries."""
    folder = libraries(root)
    loader = next(folder.glob("ld-linux-*.so.*"))
    programs = root / "usr" / "local" / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    source = programs / "main.c"
    source.write_text("int Py_BytesMain(int, char **);\nint main(int c, char **v) { return Py_BytesMain(c, v); }\n")
    for version in versions:
        libpython = next(folder.glob(f"libpython{version}.so.*"))
        link = [f"-Wl,--dynamic-linker={loader}", f"-Wl,-rpath,{folder}", "-Wl,--disable-new-dtags"]
        link += ["-Wl,--allow-shlib-undefined"]  # the linker would look for libpython's own needs on this machine
        run(["cc", "-o", str(in_place(root, version)), str(source), str(libpython), *link])
