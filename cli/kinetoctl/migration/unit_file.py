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

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from kinetoctl.errors import NotMigrated
from kinetoctl.migration.flag_text import read_file, words

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
    raise NotMigrated(f"{unit} does not start {program}: its ExecStart is {shown}; name its flag file with --flags")


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
