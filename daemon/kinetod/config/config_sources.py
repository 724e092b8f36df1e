"""Combines options, environment, file and defaults into one Config, with the source of each value.

Theory of operation
    The first source that sets a value wins: option, environment, file, default. All errors in the file and the
    environment are collected and raised together as a ConfigError. The file is TOML; the line of a key is found by a
    second pass over its text, only for messages.
"""

import contextlib
import difflib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import tomllib

from kinetod.config.default_paths import default_config_file
from kinetod.config.rules import RULES
from kinetod.config.setting import CONFIG_VARIABLE, VARIABLE_PREFIX, SettingSpec
from kinetod.config.settings import BY_NAME, KEYS, SECTIONS, Config
from kinetod.config.value_kinds import ItemError

MAX_FILE_BYTES = 1 << 20
DEFAULT = "default"
_ASSIGNMENT = re.compile(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")
_PART = re.compile(r"[\w-]+|\"[^\"]*\"|'[^']*'")
_HEADER = re.compile(r"\s*\[\[?([^\[\]]+)\]\]?\s*(?:#.*)?$")


class Problem(NamedTuple):
    """One problem. where: `FILE line N: section.key` or a variable's name."""

    where: str
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


class ConfigError(Exception):
    """The configuration cannot be used; `problems` lists everything that is wrong."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig:
    """A usable configuration. sources: by key name; warnings: to log; path: the file that was read, or None."""

    config: Config
    sources: Mapping[str, str]
    warnings: tuple[str, ...]
    path: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What was given at the start and applies to every reload. options: parsed values by key name."""

    named_file: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def load(self) -> LoadedConfig:
        """Reads everything again. Blocks. Raises ConfigError."""
        return load(self.named_file, self.options, self.environ)


def load(named_file: Path | None, options: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> LoadedConfig:
    """Loads the configuration. Blocks. Raises ConfigError, also if a file that was named is missing."""
    if named_file is None and (text := environ.get(CONFIG_VARIABLE)):
        named_file = Path(text)
    path = named_file or default_config_file(environ=environ)
    problems: list[Problem] = []
    file = _read(path, problems, needed=named_file is not None)
    values, sources = dict[str, Any](), dict[str, str]()
    for key in KEYS:
        layers = _layers(key, options, environ, file, problems)  # the last one counts; all of them must be right
        sources[key.name], values[key.field] = list(layers)[-1]
    if problems:
        raise ConfigError(problems)
    config = _for_its_disk(Config(**values))
    if problems := [Problem(_blamed(name, sources), text) for rule in RULES for name, text in rule(config)]:
        raise ConfigError(problems)
    read = path if file is not None else None
    return LoadedConfig(config=config, sources=sources, warnings=tuple(_strange_variables(environ)), path=read)


def _for_its_disk(config: Config) -> Config:
    """Sets the reserve in bytes for the disk on which the store is or will be created."""
    if not config.min_free_percent:
        return config
    reserve = 0
    for path in (config.state_dir, *config.state_dir.parents):
        with contextlib.suppress(OSError):
            status = os.statvfs(path)
            reserve = status.f_blocks * status.f_frsize * config.min_free_percent // 100
            break
    return replace(config, min_free_bytes=max(config.min_free_bytes, reserve))


def _layers(
    key: SettingSpec,
    options: Mapping[str, Any],
    environ: Mapping[str, str],
    file: "_ConfigFile | None",
    problems: list[Problem],
) -> Iterator[tuple[str, Any]]:
    """The sources that give the key a value, with the value; a wrong value is None and adds a problem."""
    yield DEFAULT, key.default_value()
    if file is not None and key.name in file.values:
        where = file.at(key.name)
        problems += file.secrecy(key)
        value = file.values[key.name]
        yield where, _checked(lambda: key.kind.check(value), key, where, problems, file)
    if text := environ.get(key.variable):
        yield key.variable, _checked(lambda: key.parse(text), key, key.variable, problems)
    if key.name in options:
        yield key.option, options[key.name]


def _checked(
    read: Callable[[], Any], key: SettingSpec, where: str, problems: list[Problem], file: "_ConfigFile | None" = None
) -> Any:
    try:
        return read()
    except ValueError as exc:
        name = key.name + (exc.path if isinstance(exc, ItemError) else "")
        problems.append(Problem(f"{file.at(name) if file else where}: {name}", str(exc)))
        return None


def _blamed(name: str, sources: Mapping[str, str]) -> str:
    """A rule's complaint with its place. name: a key's or an item's, such as `access.roles.ada`."""
    key = next((known for known in sources if f"{name}.".startswith(f"{known}.")), "")
    return f"{sources.get(key, DEFAULT)}: {name}"


def reloaded(running: Config, fresh: Config) -> tuple[Config, list[SettingSpec], list[SettingSpec]]:
    """The configuration after a reload, the keys that change, and those that need a restart."""
    different = [key for key in KEYS if getattr(running, key.field) != getattr(fresh, key.field)]
    changed = [key for key in different if key.reload]
    changes = {key.field: getattr(fresh, key.field) for key in changed}
    return replace(running, **changes), changed, [key for key in different if not key.reload]


# environment


def _strange_variables(environ: Mapping[str, str]) -> Iterator[str]:
    known = {CONFIG_VARIABLE, *(key.variable for key in KEYS)}
    for name in sorted(environ):
        if name.startswith(VARIABLE_PREFIX) and name not in known:
            yield f"kinetod has no variable {name}{_did_you_mean(name, known)}"


# the file


class _ConfigFile(NamedTuple):
    path: Path
    mode: int
    lines: Mapping[str, int]
    values: dict[str, Any]  # by key name, as TOML has them

    def at(self, name: str) -> str:
        """The file and, if found, the line of a key or of an item's key."""
        while name and name not in self.lines:
            name = name[: max(name.rfind("."), name.rfind("["), 0)]
        return f"{self.path} line {self.lines[name]}" if name else str(self.path)

    def secrecy(self, key: SettingSpec) -> Iterator[Problem]:
        """What is wrong with keeping a secret in this file."""
        if key.secret and self.values[key.name] and self.mode & stat.S_IROTH:
            text = f"is a secret, and everybody can read the file (mode {self.mode:04o}); run chmod o-rwx {self.path}"
            yield Problem(f"{self.at(key.name)}: {key.name}", text)


def _read(path: Path, problems: list[Problem], *, needed: bool) -> _ConfigFile | None:
    try:
        data, mode = _bytes(path)
        text = data.decode()
        tree = tomllib.loads(text)
    except FileNotFoundError as exc:
        if needed:
            problems.append(Problem(str(path), f"{exc.strerror}; name another file or omit --config"))
        return None
    except OSError as exc:
        problems.append(Problem(str(path), exc.strerror or str(exc)))
        return None
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        problems.append(Problem(f"{path} line {line}", "is not UTF-8 text"))
        return None
    except tomllib.TOMLDecodeError as exc:
        problems.append(_no_toml(path, str(exc)))
        return None
    except (ValueError, RecursionError) as exc:
        what = "values are nested too deeply" if isinstance(exc, RecursionError) else str(exc)
        problems.append(Problem(str(path), f"is not valid TOML: {what}"))
        return None
    if mode & stat.S_IWOTH:
        problems.append(Problem(str(path), f"can be changed by everybody (mode {mode:04o}); run chmod o-w {path}"))
    file = _ConfigFile(path, mode, key_lines(text), {})
    for name, value in _leaves(tree, ""):
        if name in BY_NAME:
            file.values[name] = value
        else:
            problems.append(Problem(f"{file.at(name)}: {name}", _unknown(name, value)))
    return file


def _bytes(path: Path) -> tuple[bytes, int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # does not wait for a FIFO's writer
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"it is longer than {MAX_FILE_BYTES} bytes")
    return data, stat.S_IMODE(status.st_mode)


def _no_toml(path: Path, message: str) -> Problem:
    match = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", message, re.DOTALL)
    if match is None:
        return Problem(str(path), f"is not valid TOML: {message}")
    return Problem(f"{path} line {match[2]}", f"is not valid TOML: {match[1]} (column {match[3]})")


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted names and values. Tables that are values of keys, or unknown, are not expanded."""
    for name, value in tree.items():
        path = f"{prefix}.{name}" if prefix else name
        is_section = any(f"{section}.".startswith(f"{path}.") for section in SECTIONS)
        if isinstance(value, dict) and is_section and path not in BY_NAME:
            yield from _leaves(value, path)
        else:
            yield path, value


def _unknown(name: str, value: object) -> str:
    if name in SECTIONS:
        return f"is a section, not a key: write [{name}]"
    if isinstance(value, dict):
        return f"there is no such section{_did_you_mean(name, SECTIONS)}"
    last = name.rpartition(".")[2]
    elsewhere = [each for each in BY_NAME if each.rpartition(".")[2] == last]
    return f"there is no such key{_did_you_mean(name, BY_NAME, elsewhere)}"


def _did_you_mean(name: str, known: Iterable[str], at_once: Sequence[str] = ()) -> str:
    nearest = at_once or difflib.get_close_matches(name[:200], list(known), 1, 0.6)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def key_lines(text: str) -> dict[str, int]:
    """The line of each key and section by dotted name, as far as it can be found without a full parser."""
    lines: dict[str, int] = {}
    section = ""
    closing = ""  # what ends the text over several lines that we are in
    for number, line in enumerate(text.split("\n"), 1):
        if closing:
            closing = "" if closing in line else closing
            continue
        if match := _HEADER.match(line):
            section = _dotted(match[1])
            lines.setdefault(section, number)
        elif match := _ASSIGNMENT.match(line):
            name = ".".join(filter(None, (section, _dotted(match[1]))))
            lines.setdefault(name, number)
        closing = next((mark for mark in ('"""', "'''") if line.count(mark) % 2), "")
    return lines


def _dotted(text: str) -> str:
    """The dotted name of a TOML key, `a . "b"` as `a.b`."""
    return ".".join(part.strip().strip("\"'") for part in _PART.findall(text))
