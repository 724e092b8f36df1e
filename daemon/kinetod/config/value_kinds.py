"""The kinds of setting: how a value is read from text and from TOML, and how it is written.

Options and environment variables hold text. Every reader raises ValueError with the rest of a sentence that begins with
the setting's name: `'5 parsecs' is not a valid duration; expected for example 500ms, 5s or 10min`. A problem in one
item of a list or table is an ItemError, which knows the item.
"""

import json
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import tomllib
from kineto_trace.base.quantities import BINARY_UNITS, parse_duration_ns, parse_size_bytes

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
MAX_INT64 = 2**63 - 1
MAX_DURATION_NS = 3650 * 86_400 * 10**9  # ten years: beyond it clocks and timers overflow
MAX_TEXT_CHARS = 4096
CREDENTIAL_PREFIX = "credential:"
CREDENTIALS_VARIABLE = "CREDENTIALS_DIRECTORY"  # systemd's, for LoadCredential=
_EXACT_UNITS_NS = (
    ("d", 86_400 * 10**9), ("h", 3600 * 10**9), ("min", 60 * 10**9),
    ("s", 10**9), ("ms", 10**6), ("us", 10**3), ("ns", 1),
)  # fmt: skip
_YES = ("1", "true", "t", "yes", "y", "on")
_NO = ("0", "false", "f", "no", "n", "off")
_TOML_NAMES = {bool: "a boolean", int: "a number", float: "a decimal number", list: "a list", dict: "a table"}
VARIABLE_PREFIX = "KINETOD_"
CONFIG_VARIABLE = "KINETOD_CONFIG"  # names the file
METADATA = "setting"  # where a field keeps its declaration
PLUGIN_NAME = re.compile(r"[a-z][a-z0-9]{1,15}")


class ItemError(ValueError):
    """A wrong item. path: suffix of the setting's name, such as `[2]` or `.ada`."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(problem)
        self.path = path


class Kind(ABC, Generic[T_co]):
    """A kind of value. name: its name in documents."""

    name: str

    @abstractmethod
    def parse(self, text: str) -> T_co:
        """Parses the text of an option or variable. Raises ValueError."""

    def check(self, value: object) -> T_co:
        """Converts a TOML value. Raises ValueError."""
        return self.parse(_text(value))

    def show(self, value: Any) -> str:
        """The value as TOML; `check` converts it back exactly."""
        return quoted(str(value))


class ParsedText(Kind[T]):
    """A value parsed by a function, which raises ValueError with the full explanation. Shown by `str`."""

    def __init__(self, name: str, parse: Callable[[str], T]) -> None:
        self.name = name
        self._parse = parse

    def parse(self, text: str) -> T:
        """Raises ValueError."""
        return self._parse(_bounded(text))


class Text(ParsedText[str]):
    """Any text."""

    def __init__(self) -> None:
        super().__init__("text", str)


class Duration(Kind[int]):
    """Nanoseconds, written with a unit or as a plain number of seconds."""

    name = "duration"

    def __init__(self, *, least_ns: int = 1) -> None:
        self._least_ns = least_ns

    def parse(self, text: str) -> int:
        """Parses nanoseconds. Raises ValueError."""
        try:
            value = parse_duration_ns(_bounded(text))
        except ValueError:
            raise ValueError(
                f"{_short(text)} is not a valid duration; expected for example 500ms, 5s or 10min"
            ) from None
        return _between(value, self._least_ns, MAX_DURATION_NS, _duration_text)

    def check(self, value: object) -> int:
        """Also accepts a number of seconds."""
        return self.parse(str(value) if type(value) in (int, float) else _text(value))

    def show(self, value: Any) -> str:
        """The value in the largest unit that divides it."""
        return quoted(_duration_text(value))


class Size(Kind[int]):
    """Bytes, written with a unit or as a plain number."""

    name = "size"

    def __init__(self, *, least: int = 1) -> None:
        self._least = least

    def parse(self, text: str) -> int:
        """Parses bytes. Raises ValueError."""
        try:
            value = parse_size_bytes(_bounded(text))
        except ValueError:
            raise ValueError(f"{_short(text)} is not a valid size; expected for example 128MiB, 8GiB or 4096") from None
        return _between(value, self._least, MAX_INT64, str)

    def check(self, value: object) -> int:
        """Also accepts a number of bytes."""
        return self.parse(str(value) if type(value) is int else _text(value))

    def show(self, value: Any) -> str:
        """The value in the largest unit that divides it."""
        for unit, factor in BINARY_UNITS:
            if value and value % factor == 0:
                return quoted(f"{value // factor}{unit}")
        return str(value)


class Count(Kind[int]):
    """A whole number in a range."""

    name = "number"

    def __init__(self, least: int, most: int = MAX_INT64) -> None:
        self._least = least
        self._most = most

    def parse(self, text: str) -> int:
        """Parses the number. Raises ValueError."""
        try:
            value = int(_bounded(text))
        except ValueError:
            raise ValueError(f"{_short(text)} is not a whole number") from None
        return _between(value, self._least, self._most, str)

    def check(self, value: object) -> int:
        """Accepts a TOML integer only."""
        if type(value) is not int:
            raise ValueError(f"must be a whole number, not {toml_name(value)}")
        return _between(value, self._least, self._most, str)

    def show(self, value: Any) -> str:
        """The decimal digits."""
        return str(value)


class Switch(Kind[bool]):
    """True or false."""

    name = "switch"

    def parse(self, text: str) -> bool:
        """Raises ValueError."""
        word = text.strip().lower()
        if word not in _YES + _NO:
            raise ValueError(f"{_short(text)} is neither true nor false")
        return word in _YES

    def check(self, value: object) -> bool:
        """Accepts a TOML boolean only."""
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, not {toml_name(value)}")
        return value

    def show(self, value: Any) -> str:
        """The TOML boolean."""
        return "true" if value else "false"


class Choice(Kind[str]):
    """One of a few words, whatever their case."""

    name = "word"

    def __init__(self, *words: str) -> None:
        self.words = words

    def parse(self, text: str) -> str:
        """Returns the word in lower case. Raises ValueError."""
        if (word := text.strip().lower()) not in self.words:
            raise ValueError(f"{_short(text)} is not one of {', '.join(self.words)}")
        return word


class FolderPath(Kind[Path]):
    """A path: absolute in a file; options and variables may be relative to the working directory."""

    name = "path"

    def parse(self, text: str) -> Path:
        """Returns the path, made absolute. Raises ValueError."""
        if not text:
            raise ValueError("is empty; expected a path")
        return Path(_bounded(text)).absolute()

    def check(self, value: object) -> Path:
        """Raises ValueError."""
        text = _text(value)
        if text and not Path(text).is_absolute():
            raise ValueError(f"{_short(text)} is not an absolute path; it must begin with /")
        return self.parse(text)


class ExistingFile(FolderPath):
    """A readable file; `credential:NAME` is one loaded by the service manager (LoadCredential=NAME:…)."""

    name = "file"
    private = False

    def parse(self, text: str) -> Path:
        """Returns the path after checking the file. Raises ValueError."""
        path = super().parse(credential_path(text) if text.startswith(CREDENTIAL_PREFIX) else text)
        try:
            mode = path.stat().st_mode
            readable = os.access(path, os.R_OK, effective_ids=True)
        except OSError as exc:
            raise ValueError(f"{path}: {exc.strerror}") from exc
        if not stat.S_ISREG(mode):
            raise ValueError(f"{path} is not a file")
        if not readable:
            raise ValueError(f"{path} cannot be read by this user (uid {os.geteuid()})")
        if self.private and mode & stat.S_IROTH:
            raise ValueError(
                f"{path} holds a secret and can be read by everybody (mode {stat.S_IMODE(mode):04o}); "
                f"run chmod o-rwx {path}"
            )
        return path

    def check(self, value: object) -> Path:
        """Raises ValueError."""
        if isinstance(value, str) and value.startswith(CREDENTIAL_PREFIX):
            return self.parse(value)
        return super().check(value)


class SecretFile(ExistingFile):
    """A file with a key or password, which must not be readable by everybody."""

    name = "secret file"
    private = True


class Maybe(Kind[T | None]):
    """An optional value; the empty text is None."""

    def __init__(self, kind: Kind[T]) -> None:
        self._kind = kind
        self.name = kind.name

    def parse(self, text: str) -> T | None:
        """Returns None for the empty text. Raises ValueError."""
        return self._kind.parse(text) if text else None

    def check(self, value: object) -> T | None:
        """Returns None for the empty text. Raises ValueError."""
        return None if value == "" else self._kind.check(value)

    def show(self, value: Any) -> str:
        """The empty text for None."""
        return '""' if value is None else self._kind.show(value)


class ListOf(Kind[tuple[T, ...]]):
    """A tuple. Variables separate the items by spaces; options are repeated."""

    def __init__(self, kind: Kind[T]) -> None:
        self.item = kind
        self.name = f"list of {kind.name}"

    def parse(self, text: str) -> tuple[T, ...]:
        """Raises ItemError."""
        return tuple(_item(f"[{index}]", self.item.parse, each) for index, each in enumerate(text.split()))

    def check(self, value: object) -> tuple[T, ...]:
        """Accepts a list or a single item. Raises ValueError."""
        if not isinstance(value, list):
            return (self.item.check(value),)
        return tuple(_item(f"[{index}]", self.item.check, each) for index, each in enumerate(value))

    def show(self, value: Any) -> str:
        """A TOML array on one line."""
        return f"[{', '.join(map(self.item.show, value))}]"


class TableOf(Kind[Mapping[str, T]]):
    """A dict from names chosen by the site, such as users, to values. Variables hold it as a TOML inline table."""

    def __init__(self, kind: Kind[T]) -> None:
        self.item = kind
        self.name = f"table of {kind.name}"

    def parse(self, text: str) -> dict[str, T]:
        """Raises ValueError."""
        try:
            found = tomllib.loads(f"value = {_bounded(text).strip()}")
        except (ValueError, RecursionError):
            found = {}
        if found.keys() != {"value"}:
            raise ValueError(f"{_short(text)} is not a table; expected for example {{ada = 1}}")
        return self.check(found["value"])

    def check(self, value: object) -> dict[str, T]:
        """Raises ValueError."""
        if not isinstance(value, Mapping):
            raise ValueError(f"must be a table, not {toml_name(value)}")
        return {name: _item(f".{name}", self.item.check, each) for name, each in value.items()}

    def show(self, value: Any) -> str:
        """A TOML inline table."""
        items = ", ".join(f"{quoted(name)} = {self.item.show(each)}" for name, each in value.items())
        return f"{{{items}}}"


def credential_path(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """The path at which the service manager put `credential:NAME`. Raises ValueError."""
    name = text.removeprefix(CREDENTIAL_PREFIX)
    if not name or "/" in name or name in (".", ".."):
        raise ValueError(f"{_short(text)} does not name a credential; expected credential:NAME")
    if not (folder := environ.get(CREDENTIALS_VARIABLE)):
        raise ValueError(f"{_short(text)}: the service manager has passed no credentials; add LoadCredential={name}:…")
    return f"{folder}/{name}"


def toml_name(value: object) -> str:
    """The type of a TOML value, for error messages."""
    return "a string" if isinstance(value, str) else _TOML_NAMES.get(type(value), "a date or time")


def quoted(text: str) -> str:
    """A TOML basic string."""
    escaped = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    return escaped.encode("utf-8", "backslashreplace").decode()


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a string in quotes, not {toml_name(value)}")
    return value


def _bounded(text: str) -> str:
    if len(text) > MAX_TEXT_CHARS:
        raise ValueError(f"is longer than {MAX_TEXT_CHARS} characters")
    if "\0" in text:
        raise ValueError("contains a NUL character")
    return text


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "…")


def _item(path: str, read: Callable[[Any], T], value: object) -> T:
    try:
        return read(value)
    except ItemError as exc:
        raise ItemError(path + exc.path, str(exc)) from exc
    except ValueError as exc:
        raise ItemError(path, str(exc)) from exc


def _between(value: int, least: int, most: int, show: Callable[[int], str]) -> int:
    if value < least:
        what = "must be greater than 0" if least == 1 else f"must be at least {show(least)}"
        raise ValueError(f"{what}, got {show(value)}" if value > -MAX_INT64 else what)
    if value > most:
        raise ValueError(f"must be at most {show(most)}")
    return value


def _duration_text(value_ns: int) -> str:
    unit, unit_ns = next(each for each in _EXACT_UNITS_NS if value_ns % each[1] == 0)
    return f"{value_ns // unit_ns}{unit}" if value_ns else "0"


class HostDefault(NamedTuple, Generic[T]):
    """A default that depends on the host or the user, with its description and root's value for the example file."""

    compute: Callable[[], T]
    words: str
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSpec:
    """One setting; `setting` explains the parts. field: of Config."""

    name: str
    field: str = ""
    kind: Kind[Any]
    default: Any
    meaning: str
    option: str = ""
    reload: bool = False
    secret: bool = False

    @property
    def section(self) -> str:
        """The section: the part of the name before the last dot."""
        return self.name.rpartition(".")[0]

    @property
    def variable(self) -> str:
        """The environment variable that overrides the file."""
        stem = self.option.removeprefix("--") or self.name
        return VARIABLE_PREFIX + stem.replace("-", "_").replace(".", "_").upper()

    @property
    def off_switch(self) -> bool:
        """Whether the option and its variable turn the setting off."""
        return self.option.startswith("--no-")

    @property
    def default_words(self) -> str:
        """Description of a default that depends on the host; "" for any other."""
        return self.default.words if isinstance(self.default, HostDefault) else ""

    def default_value(self) -> Any:
        """The value if none is configured."""
        return self.default.compute() if isinstance(self.default, HostDefault) else self.default

    def default_text(self) -> str:
        """The default as TOML; root's if it depends on the user."""
        return self.default.example if isinstance(self.default, HostDefault) else self.kind.show(self.default)

    def show(self, value: Any) -> str:
        """The value as TOML, with secrets hidden."""
        return '"(not shown)"' if self.secret and value else self.kind.show(value)

    def parse(self, text: str) -> Any:
        """Parses the text of an option or variable. Raises ValueError."""
        value = self.kind.parse(text)
        return not value if self.off_switch else value


def setting(
    name: str,
    kind: Kind[T],
    default: T | HostDefault[T],
    *,
    meaning: str,
    option: str = "",
    reload: bool = False,
    secret: bool = False,
) -> T:
    """Declares a field of Config, and all that users see of it: key, option, variable, documentation, messages.

    name      section.key, as in the file
    kind      how it is read and written (value_kinds)
    default   the value if none is configured; a HostDefault where it depends on the host or the user
    meaning   one sentence, without the default
    option    on the command line, where there is one; its variable is then KINETOD_<OPTION>, else
              KINETOD_<SECTION>_<KEY>. Secrets have none: everybody can read command lines. --no-… turns the setting off
    reload    a SIGHUP is enough: whoever uses it reads `settings.current.<field>` each time, or subscribes
    secret    the value is never shown, and its file must not be readable by everybody
    """
    spec = SettingSpec(
        name=name, kind=kind, default=default, meaning=meaning, option=option, reload=reload, secret=secret
    )
    if isinstance(default, (HostDefault, dict)):  # dataclasses refuse a dict as the default itself
        compute: Callable[[], T] = spec.default_value
        return field(default_factory=compute, metadata={METADATA: spec})
    return field(default=default, metadata={METADATA: spec})


def checked_plugin(text: str) -> str:
    """Checks a plug-in's name. Raises ValueError."""
    if not PLUGIN_NAME.fullmatch(text):
        raise ValueError(f"expected a plug-in name (2 to 16 lower-case letters and digits), got {text!r:.60}")
    return text
