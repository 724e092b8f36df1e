"""The syntax of gflags: flag files and command lines, as Dynolog reads them. Pure but for reading named files.

Theory of operation
    A flag is `--name=value` or `-name=value`; a switch also `--name` and `--noname`; on a command line `--name value`,
    too, and `--` ends the flags. In a flag file each flag is a line; lines without a dash name programs, and what
    follows is for these only, until the next such line; `#` begins a comment line. `--flagfile=A,B` inserts files,
    `--fromenv` and `--tryfromenv` take `FLAGS_name` of the environment. Dashes in names count as underscores.

    Whether an argument belongs to the flag before it depends on what is a switch, so the reader is told. gflags stops
    at a flag that it does not know on the command line and ignores it in a file; here both are kept, to be reported.
"""

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from kinetoctl.errors import NotMigrated

MAX_DEPTH = 16  # files that insert files
MAX_BYTES = 1 << 20
_FILES, _NEEDED, _IF_SET = "flagfile", "fromenv", "tryfromenv"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFlag:
    """A flag as it was given. where: for people. value: "true" or "false" for a switch without one; None: none."""

    name: str
    value: str | None
    where: str


class FlagReader:
    """Reads flags. switches: the names of those that need no value; known: all names; environ: of Dynolog's process."""

    def __init__(
        self,
        *,
        program: str,
        known: Collection[str],
        switches: Collection[str],
        environ: Mapping[str, str],
        read_text: Callable[[Path], str] | None = None,
        stand_in: Path | None = None,
    ) -> None:
        """stand_in: the file to read in the place of every one that the command line inserts."""
        self._program = program
        self._known = known
        self._switches = switches
        self._environ = environ
        self._read_text = read_text or read_file
        self._stand_in = stand_in
        self.files: list[Path] = []  # that were read

    def command_line(self, arguments: Sequence[str], where: str) -> list[GivenFlag]:
        """The flags of a command line without its program. Raises NotMigrated."""
        return list(self._of_arguments(list(arguments), where))

    def file(self, path: Path) -> list[GivenFlag]:
        """The flags of a flag file. Raises NotMigrated."""
        return list(self._of_file(path, 0))

    def _of_arguments(self, left: list[str], where: str) -> Iterator[GivenFlag]:
        while left:
            argument = left.pop(0)
            if argument == "--":
                return
            if not argument.startswith("-") or argument == "-":
                continue  # gflags skips what is no flag
            name, value = self._split(argument)
            follows = bool(left) and not left[0].startswith("-")
            if value is None and follows and name not in self._switches:
                value = left.pop(0)
            yield from self._inserted(GivenFlag(name=name, value=value, where=where), 0)

    def _of_file(self, path: Path, depth: int) -> Iterator[GivenFlag]:
        if depth > MAX_DEPTH:
            raise NotMigrated(f"{path}: more than {MAX_DEPTH} flag files insert each other")
        text = self._read_text(path)
        self.files.append(path)
        for_us, naming_programs = True, False
        for number, line in enumerate(map(str.strip, text.splitlines()), 1):
            if not line or line.startswith("#"):
                continue
            if not line.startswith("-"):
                for_us = self._names_us(line) or (naming_programs and for_us)
                naming_programs = True
                continue
            naming_programs = False
            if for_us:
                name, value = self._split(line)
                yield from self._inserted(GivenFlag(name=name, value=value, where=f"{path} line {number}"), depth)

    def _inserted(self, given: GivenFlag, depth: int) -> Iterator[GivenFlag]:
        """The flag itself, or what it stands for."""
        names = [name.strip() for name in (given.value or "").split(",") if name.strip()]
        if given.name == _FILES:
            stand_in = self._stand_in if depth == 0 else None
            for path in [stand_in] if stand_in else map(Path, names):
                yield from self._of_file(path, depth + 1)
        elif given.name in (_NEEDED, _IF_SET):
            for name in names:
                variable = f"FLAGS_{name}"
                if (value := self._environ.get(variable)) is not None:
                    yield GivenFlag(name=name, value=value, where=f"{variable}, by {given.where}")
                elif given.name == _NEEDED:
                    raise NotMigrated(f"{given.where}: --{_NEEDED} names {name}, but {variable} is not set")
        else:
            yield given

    def _split(self, text: str) -> tuple[str, str | None]:
        """Name and value of a flag that begins with one or two dashes."""
        name, equals, value = text.removeprefix("-").removeprefix("-").partition("=")
        name = name.strip().replace("-", "_")
        if name in self._switches:
            return name, value.strip() if equals else "true"
        positive = name.removeprefix("no")
        if name not in self._known and name != positive and positive in self._switches:
            return positive, "false"
        return name, value.strip() if equals else None

    def _names_us(self, line: str) -> bool:
        names = (self._program, PurePath(self._program).name)
        return any(fnmatchcase(name, pattern) for pattern in line.split() for name in names)


def read_file(path: Path) -> str:
    """The text of a file. Raises NotMigrated."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise NotMigrated(f"cannot read {path}: {exc.strerror or exc}") from exc
    if len(data) > MAX_BYTES:
        raise NotMigrated(f"{path} is longer than {MAX_BYTES} bytes, which no file of flags or unit is")
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise NotMigrated(f"{path} is not UTF-8 text (byte {exc.start})") from exc


def words(text: str, where: str) -> list[str]:
    """The words of a command line with quotes. Raises NotMigrated."""
    try:
        return shlex.split(text)
    except ValueError as exc:
        raise NotMigrated(f"{where}: {str(exc).lower()} in {text!r:.120}") from exc
