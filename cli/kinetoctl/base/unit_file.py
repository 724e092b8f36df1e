"""A systemd unit with its drop-ins, as far as it says how a daemon is started.

Theory of operation
    systemd reads the first NAME.service of its folders, then every NAME.service.d/*.conf of all of them, sorted by name
    (of two with the same name, that of the earlier folder). A later value replaces an earlier one; lists (ExecStart,
    Environment, EnvironmentFile) are appended to, and emptied by an empty value. A drop-in that is a link to /dev/null
    turns off those of its name in later folders. A line that ends with a backslash goes on with the next one, also in a
    file of variables. In ExecStart the unit's own variables are `${NAME}`, anywhere, and `$NAME` as a word of its
    own, which becomes several; in a shell's -c the shell does the same with `$NAME` in a word, too. `$$` and `%%` are
    one of each; the specifiers of the unit's name are known, others (`%H`) are kept.
"""

import os
import re
import shlex
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from kinetoctl.errors import NotMigrated

FOLDERS = tuple(
    Path(folder)
    for folder in (
        "/etc/systemd/system",
        "/run/systemd/system",
        "/usr/local/lib/systemd/system",
        "/usr/lib/systemd/system",
        "/lib/systemd/system",
    )
)
_SECTION = "Service"
_LISTS = ("ExecStart", "Environment", "EnvironmentFile")
_PREFIXES = "@-:+!|"  # of a command
_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)\})")
_OF_SHELL = re.compile(r"\$(?:(\$)|\{(\w+)\}|(\w+))")
_ALONE = re.compile(r"\$(\w+)")
_SPECIFIER = re.compile(r"%([%nNpiI])")
_SHELLS = ("sh", "bash", "dash", "ksh", "zsh")
_COMMAND_ENDS = frozenset({";", "&&", "||", "|", "&"})
_MAX_DROP_INS = 1000
_NO_FILE = Path("/dev/null")
_CONTINUED = re.compile(r"(?<!\\)((?:\\\\)*)\\\n")
MAX_DEPTH = 16  # files that insert files
MAX_FILES = 256
MAX_BYTES = 1 << 20
_BLANKS = " \t\v\f"
_OF_CALLER = ("/dev/stdin", "/dev/fd/")  # a pipe that somebody writes to
_FILES, _NEEDED, _IF_SET = "flagfile", "fromenv", "tryfromenv"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFile:
    """A unit. arguments: of the program that it starts; environ: what the unit sets; settings: its other values."""

    files: Sequence[Path]
    arguments: Sequence[str]
    environ: Mapping[str, str]
    settings: Mapping[str, str] = field(default_factory=dict)


def find_unit(name: str, root: Path = Path("/")) -> Path | None:
    """The unit file of this name that systemd would read; None: there is none."""
    places = (root / folder.relative_to("/") / name for folder in FOLDERS)
    return next((path for path in places if path.is_file()), None)


def read_unit(path: Path, program: str, root: Path = Path("/")) -> UnitFile:
    """Reads the unit at `path` and its drop-ins. program: the name of the one that it starts. Raises NotMigrated."""
    files = [path, *_drop_ins(path, root)]
    settings: dict[str, str] = {}
    lists: dict[str, list[str]] = {name: [] for name in _LISTS}
    for file in files:
        for name, value in _values(read_file(file)):
            if name not in lists:
                settings[name] = value
            elif value:
                lists[name].append(value)
            else:
                lists[name].clear()
    environ = _environ(lists["EnvironmentFile"], lists["Environment"], path, root)
    arguments = _arguments(lists["ExecStart"], environ, program, path)
    return UnitFile(files=files, arguments=arguments, environ=environ, settings=settings)


def _drop_ins(path: Path, root: Path) -> list[Path]:
    """The drop-ins: beside the file, and, if it is in a folder of systemd's, in all of these."""
    folders = [root / folder.relative_to("/") for folder in FOLDERS]
    places = folders if path.parent in folders else [path.parent]
    found: dict[str, Path] = {}
    for place in places:
        for file in sorted((place / f"{path.name}.d").glob("*.conf"))[:_MAX_DROP_INS]:
            found.setdefault(file.name, file)
    return [found[name] for name in sorted(found) if found[name].resolve() != _NO_FILE]


def _values(text: str) -> list[tuple[str, str]]:
    """The assignments of the section [Service]."""
    found, section, before = [], "", ""
    for raw in text.removeprefix("\ufeff").replace("\r\n", "\n").split("\n"):
        line = raw.strip()
        if line.startswith(("#", ";")) or (not line and not before):
            continue
        line = f"{before} {line}".strip() if before else line
        if (len(line) - len(line.rstrip("\\"))) % 2:  # two are one backslash of the value
            before = line[:-1].rstrip()
            continue
        before = ""
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
        elif section == _SECTION and "=" in line:
            name, _, value = line.partition("=")
            found.append((name.strip(), value.strip()))
    return found


def _environ(files: Sequence[str], given: Sequence[str], unit: Path, root: Path) -> dict[str, str]:
    """The unit's variables; files count more than what the unit says, as for systemd."""
    environ: dict[str, str] = {}
    for text in given:
        environ |= _assignments(words(_specified(text, unit.name), f"{unit}: Environment"))
    for text in files:
        path = root / text.removeprefix("-").removeprefix("/")
        if text.startswith("-") and not path.exists():
            continue
        text_of_file = _CONTINUED.sub(r"\1", read_file(path).replace("\r\n", "\n"))
        lines = (line.strip() for line in text_of_file.split("\n"))
        for name, _, value in (line.partition("=") for line in lines if line and line[0] not in "#;"):
            environ[name.strip()] = _unquoted(value)
    return environ


def _unquoted(value: str) -> str:
    """A value of a file of variables; quotes that do not match are text, as for systemd."""
    try:
        return " ".join(shlex.split(value))
    except ValueError:
        return value.strip()


def _assignments(given: Iterable[str]) -> dict[str, str]:
    parts = (word.partition("=") for word in given)
    return {name: value for name, equals, value in parts if equals}


def _arguments(commands: Sequence[str], environ: Mapping[str, str], program: str, unit: Path) -> list[str]:
    """The arguments of the program among the commands, also behind a wrapper or in a shell's -c. Raises NotMigrated."""
    for command in commands:
        bare = command.lstrip(_PREFIXES)
        plain = ":" in command[: len(command) - len(bare)]  # nothing is expanded
        found, pattern = words(_specified(bare, unit.name), f"{unit}: ExecStart"), _VARIABLE
        if len(found) > 2 and PurePath(found[0]).name in _SHELLS and found[1].endswith("c"):
            found, pattern, plain = _shell_words(found[2], f"{unit}: ExecStart"), _OF_SHELL, False
        names = [PurePath(word).name for word in found]
        if program in names:
            arguments = found[names.index(program) + 1 :]
            end = next((place for place, word in enumerate(arguments) if word in _COMMAND_ENDS), len(arguments))
            return [
                word for each in arguments[:end] for word in ([each] if plain else _expanded(each, environ, pattern))
            ]
    # Only the programs: there may be a secret among the arguments.
    shown = ", ".join(repr(command.split(maxsplit=1)[0][:80]) for command in commands) or "nothing"
    raise NotMigrated(
        f"{unit} does not start {program}: its ExecStart is {shown}; give {program}'s flag file with --flags"
    )


def _specified(text: str, name: str) -> str:
    """The text with what the specifiers of the unit's name stand for."""
    stem = name.removesuffix(".service")
    prefix, _, instance = stem.partition("@")
    known = {"%": "%", "n": name, "N": stem, "p": prefix, "i": instance, "I": instance}
    return _SPECIFIER.sub(lambda match: known[match[1]], text)


def _shell_words(text: str, where: str) -> list[str]:
    """The words of a shell's command; what ends one is a word. Raises NotMigrated."""
    found = shlex.shlex(text, posix=True, punctuation_chars=";&|")
    found.whitespace_split, found.commenters = True, ""
    try:
        return list(found)
    except ValueError as exc:
        raise NotMigrated(f"{where}: {str(exc).lower()}") from exc


def _expanded(word: str, environ: Mapping[str, str], pattern: re.Pattern[str]) -> list[str]:
    """`$NAME` as a word of its own becomes as many words as it has; in a word it is text."""
    if alone := _ALONE.fullmatch(word):
        return _unquoted_words(environ.get(alone[1], ""))
    return [pattern.sub(lambda match: match[1] or environ.get(match[match.lastindex or 0], ""), word)]


def _unquoted_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


# The syntax of gflags: flag files and command lines, as Dynolog reads them. Pure but for reading named files.
#
# A flag is `--name=value` or `-name=value`; a switch also `--name` and `--noname`; on a command
# line `--name value`, too, and `--` ends the flags. In a flag file each flag is a line; lines without a dash name
# programs, and what follows is for these only, until the next such line; `#` begins a comment line. `--flagfile=A,B`
# inserts files, `--fromenv` and `--tryfromenv` take `FLAGS_name` of the environment. Dashes in names count as
# underscores. Blanks before a flag do not count; all others are part of its name or value.
# A byte order mark is text, so that the first line names a program; a NUL ends the file; and as long as there is a
# carriage return, lines end there and nowhere else. Nobody means any of that, so such files are refused.
# Whether an argument belongs to the flag before it depends on what is a switch, so the reader is told. gflags stops
# at a flag that it does not know on the command line and ignores it in a file; here both are kept, to be reported.
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
            raise NotMigrated(f"{path}: flag files are nested more than {MAX_DEPTH} deep")
        if len(self.files) >= MAX_FILES:
            raise NotMigrated(f"{path}: more than {MAX_FILES} flag files are included")
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
                        raise NotMigrated(f"{given.where}: {variable} refers to itself")
                    found = GivenFlag(name=name, value=value, where=f"{variable}, read by {given.where}")
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
        raise NotMigrated(f"{path} has more than {MAX_BYTES} bytes, too many for a flag file or a unit")
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise NotMigrated(f"{path} is not UTF-8 text (byte {exc.start})") from exc


def _check_text(text: str, path: Path) -> None:
    """Raises NotMigrated where gflags reads something else than people do."""
    if text.startswith("\ufeff"):
        raise NotMigrated(f"{path} begins with a byte order mark, so Dynolog ignores its flags; save it without one")
    if "\0" in text:
        raise NotMigrated(f"{path} is not plain text: it contains a NUL, where Dynolog stops reading; save it as UTF-8")
    ends = text.rpartition("\r")[0].replace("\r\n", "")
    if "\n" in ends:
        raise NotMigrated(
            f"{path} mixes Unix and Windows line endings, so Dynolog reads several lines as one; "
            "make them all the same, for example with dos2unix"
        )


def words(text: str, where: str) -> list[str]:
    """The words of a command line with quotes. Raises NotMigrated."""
    try:
        return shlex.split(text)
    except ValueError as exc:
        raise NotMigrated(f"{where}: {str(exc).lower()}") from exc  # the text may hold a secret
