"""A copy of this source tree in which a test follows a recipe of docs/how-to-add.md."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
_LIBRARIES = ("agent/kineto_agent/_native", "daemon/kineto_trace/_native")  # built, and ignored by git
_PACKAGES = ("agent", "daemon", "cli", "protos", "tests")
_PATH = re.compile(r"`((?:agent|cli|daemon|docs|protos|tests)/[\w./-]+)`")
_MODULE = re.compile(r"`(\w+\.py)`")


class SourceTree:
    """The files that git knows, and the libraries that were built. `edited`: what was changed by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.edited: set[str] = set()
        names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in names.decode().rstrip("\0").split("\0"):
            if (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, folder / name, follow_symlinks=False)
        for name in _LIBRARIES:
            shutil.copytree(ROOT / name, folder / name)

    def insert(self, path: str, after: str, text: str) -> None:
        """Puts text behind the first place where `after` stands. Raises AssertionError if it does not."""
        file = self.folder / path
        before, found, rest = file.read_text().partition(after)
        assert found, f"{path} has no {after!r}"
        file.write_text(before + after + text + rest)
        self.edited.add(path)

    def write(self, path: str, text: str) -> None:
        """Makes a new file."""
        file = self.folder / path
        assert not file.exists()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        self.edited.add(path)

    def python(self, *words: str) -> str:
        """What a program of this tree says. Raises AssertionError, with its errors, if it fails."""
        path = os.pathsep.join(str(self.folder / package) for package in _PACKAGES)
        done = subprocess.run(
            [sys.executable, *words], cwd=self.folder, env={**os.environ, "PYTHONPATH": path},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def make(self, target: str) -> None:
        """What the Makefile does. Raises AssertionError, with its errors, if it fails."""
        command = ["make", f"PYTHON={sys.executable}", target]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def text(self, path: str) -> str:
        """A file as it is now."""
        return (self.folder / path).read_text()


def named_files(title: str) -> set[str]:
    """The files and folders that the recipe with this title names; a bare module is one beside the file before it."""
    recipe = re.search(
        rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", (ROOT / "docs/how-to-add.md").read_text(), re.M | re.S
    )
    assert recipe is not None, f"docs/how-to-add.md has no recipe {title!r}"
    found: set[str] = set()
    folder = Path()
    for word in re.findall(r"`[^`]+`", recipe[1]):
        if path := _PATH.fullmatch(word):
            found.add(path[1])
            folder = Path(path[1]).parent
        elif module := _MODULE.fullmatch(word):
            found.add(str(folder / module[1]))
    return found


def leads_to(title: str, path: str) -> bool:
    """Whether the recipe names this file, or a folder that it is in."""
    return any(path == name or path.startswith(f"{name.rstrip('/')}/") for name in named_files(title))
