"""The syntax of gflags: flag files and command lines, as Dynolog reads them. Pure but for reading named files.

Theory of operation
    A flag is `--name=value` or `-name=value`; a switch also `--name` and `--noname`; on a command line `--name value`,
    too, and `--` ends the flags. In a flag file each flag is a line; lines without a dash name programs, and what
    follows is for these only, until the next such line; `#` begins a comment line. `--flagfile=A,B` inserts files,
    `--fromenv` and `--tryfromenv` take `FLAGS_name` of the environment. Dashes in names count as underscores. Blanks
    before a flag do not count; all others are part of its name or value.

    A byte order mark is text, so that the first line names a program; a NUL ends the file; and as long as there is a
    carriage return, lines end there and nowhere else. Nobody means any of that, so such files are refused.

    Whether an argument belongs to the flag before it depends on what is a switch, so the reader is told. gflags stops
    at a flag that it does not know on the command line and ignores it in a file; here both are kept, to be reported.
"""

import os
import shlex
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from kinetoctl.errors import NotMigrated

MAX_DEPTH = 16  # files that insert files
MAX_FILES = 256
MAX_BYTES = 1 << 20
_BLANKS = " \t\v\f"
_OF_CALLER = ("/dev/stdin", "/dev/fd/")  # a pipe that somebody writes to
_FILES, _NEEDED, _IF_SET = "flagfile", "fromenv", "tryfromenv"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenFlag:
    """A flag as it was given. where: for people. value: "true" or "false" for a switch without one; None: none.

    programs: the line that says for which other programs it is; "": it is for this one.
    """

    name: str
    value: str | None
    where: str
    programs: str = ""


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
            follows = bool(left) and (name in self._known or not left[0].startswith("-"))
            if value is None and follows and name not in self._switches:
                value = left.pop(0)
            yield from self._inserted(GivenFlag(name=name, value=value, where=where), 0)

    def _of_file(self, path: Path, depth: int) -> Iterator[GivenFlag]:
        if depth > MAX_DEPTH:
            raise NotMigrated(f"{path}: more than {MAX_DEPTH} flag files insert each other")
        if len(self.files) >= MAX_FILES:
            raise NotMigrated(f"{path}: more than {MAX_FILES} flag files are inserted")
        text = self._read_text(path)
        _check_text(text, path)
        self.files.append(path)
        programs, naming_programs = "", False
        for number, raw in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), 1):
            line = raw.lstrip(_BLANKS)
            if not line or line.startswith("#"):
                continue
            if not line.startswith("-"):
                ours = self._names_us(line) or (naming_programs and not programs)
                programs, naming_programs = "" if ours else line, True
                continue
            naming_programs = False
            name, value = self._split(line)
            given = GivenFlag(name=name, value=value, where=f"{path} line {number}", programs=programs)
            if programs:
                yield given
            else:
                yield from self._inserted(given, depth)

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
                    if depth > MAX_DEPTH:
                        raise NotMigrated(f"{given.where}: {variable} names itself")
                    found = GivenFlag(name=name, value=value, where=f"{variable}, by {given.where}")
                    yield from self._inserted(found, depth + 1)
                elif given.name == _NEEDED:
                    raise NotMigrated(f"{given.where}: --{_NEEDED} names {name}, but {variable} is not set")
        else:
            yield given

    def _split(self, text: str) -> tuple[str, str | None]:
        """Name and value of a flag that begins with one or two dashes."""
        name, equals, value = text.removeprefix("-").removeprefix("-").partition("=")
        name = name.replace("-", "_")
        if name in self._switches:
            return name, value if equals else "true"
        positive = name.removeprefix("no")
        if name not in self._known and name != positive and positive in self._switches:
            return positive, "false"
        return name, value if equals else None

    def _names_us(self, line: str) -> bool:
        names = (self._program, PurePath(self._program).name)
        return any(fnmatchcase(name, pattern) for pattern in line.split() for name in names)


def read_file(path: Path) -> str:
    """The text of a file, or of a pipe that the caller has open. Never waits for a writer. Raises NotMigrated."""
    waits = 0 if str(path).startswith(_OF_CALLER) else os.O_NONBLOCK
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | waits)) as file:
            if waits and not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise NotMigrated(f"{path} is not a regular file")
            data = file.read(MAX_BYTES + 1)
    except OSError as exc:
        raise NotMigrated(f"cannot read {path}: {exc.strerror or exc}") from exc
    if len(data) > MAX_BYTES:
        raise NotMigrated(f"{path} is longer than {MAX_BYTES} bytes, which no file of flags or unit is")
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise NotMigrated(f"{path} is not UTF-8 text (byte {exc.start})") from exc


def _check_text(text: str, path: Path) -> None:
    """Raises NotMigrated where gflags reads something else than people do."""
    if text.startswith("\ufeff"):
        raise NotMigrated(f"{path} begins with a byte order mark, so Dynolog ignores its flags; save it without one")
    if "\0" in text:
        raise NotMigrated(f"{path} is not plain text: it holds a NUL, at which Dynolog stops reading; save it as UTF-8")
    ends = text.rpartition("\r")[0].replace("\r\n", "")
    if "\n" in ends:
        raise NotMigrated(
            f"{path} has line ends of both Unix and Windows, so Dynolog takes several lines for one; "
            "make them all the same, for example with dos2unix"
        )


def words(text: str, where: str) -> list[str]:
    """The words of a command line with quotes. Raises NotMigrated."""
    try:
        return shlex.split(text)
    except ValueError as exc:
        raise NotMigrated(f"{where}: {str(exc).lower()}") from exc  # the text may hold a secret
