"""Combines options, environment, file and defaults into one Config, with the source of each value.

Theory of operation
    The first source that sets a value wins: option, environment, file, default. All errors in the file and the
    environment are collected and raised together as a ConfigError. The file is TOML; the line of a key is found by a
    second pass over its text, only for messages.
"""

import asyncio
import contextlib
import difflib
import importlib.util
import logging
import os
import re
import stat
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import tomllib
from kineto_protos.endpoints import is_loopback
from kineto_trace.base.install_advice import install_advice
from kineto_trace.base.quantities import times

from kinetod.base import notify
from kinetod.base.http_headers import headers_in, webhook_secret_in
from kinetod.base.object_store_urls import missing_package
from kinetod.config.addresses import ProfileForm, default_config_file, parse_profiles
from kinetod.config.metrics_settings import COMPAT_OFF, JSON_LOG_OFF
from kinetod.config.settings import BY_NAME, KEYS, SECOND_NS, SECTIONS, Config, Settings
from kinetod.config.value_kinds import CONFIG_VARIABLE, VARIABLE_PREFIX, ItemError, SettingSpec
from kinetod.permissions.role_grants import wrong_names

MAX_FILE_BYTES = 1 << 20
DEFAULT = "default"
_ASSIGNMENT = re.compile(r"\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")
_PART = re.compile(r"[\w-]+|\"[^\"]*\"|'[^']*'")
_HEADER = re.compile(r"\s*\[\[?([^\[\]]+)\]\]?\s*(?:#.*)?$")
TLS_KEYS = ("access.tls_certificate", "access.tls_key", "access.tls_client_ca")
MAX_WEBHOOKS = 8


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
    """The inputs given at the start, which apply to every reload. options: parsed values by key name."""

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
        layers = _layers(key, options, environ, file, problems)  # the last one counts; all of them must be valid
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
    """The place of a rule's complaint. name: a key's or an item's, such as `access.roles.ada`."""
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
            yield f"kinetod has no environment variable {name}{_did_you_mean(name, known)}"


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
        """Problems with keeping a secret in this file."""
        if key.secret and self.values[key.name] and self.mode & stat.S_IROTH:
            text = f"is a secret, but everybody can read the file (mode {self.mode:04o}); run chmod o-rwx {self.path}"
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
        problems.append(Problem(str(path), f"cannot be read as TOML: {what}"))
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
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # does not block on a FIFO without a writer
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
    closing = ""  # delimiter that ends the current multi-line text
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


# Constraints between settings. Each rule yields (name of a key, problem) for violations.
def access_problems(config: Config) -> Iterable[tuple[str, str]]:
    """Conflicts between settings: the name of one of them, and the problem."""
    files = (config.tls_certificate, config.tls_key, config.tls_client_ca)
    if any(files) and not all(files):
        missing = [name for name, file in zip(TLS_KEYS, files, strict=True) if file is None]
        yield missing[0], f"is missing; TLS needs {', '.join(TLS_KEYS)}"
    for name in wrong_names(config.certificates):
        yield f"access.certificates.{name}", "is not a valid certificate name; it must begin with URI:, DNS: or CN:"
    for name in wrong_names(name for name in config.web_proxies if ":" in name):
        yield "access.web_proxies", f"{name!r:.80} is neither a user nor a certificate name (URI:…, DNS:… or CN:…)"
    yield from _kubernetes_problems(config)
    if config.has_tls:
        return
    for address in config.listen:
        if address.is_loopback and not config.loopback_without_tls:
            yield (
                "server.listen",
                f"{address} needs certificates ({', '.join(TLS_KEYS)}), or access.loopback_without_tls = true",
            )
        elif address.path is None and not address.is_loopback:
            yield (
                "server.listen",
                f"{address} is not a loopback address and needs certificates ({', '.join(TLS_KEYS)}): without TLS "
                "anybody on the network could trace processes here. You can also listen on unix:/path and use ssh -L",
            )


def _kubernetes_problems(config: Config) -> Iterable[tuple[str, str]]:
    if not config.kubernetes:
        return
    if not config.node_name:
        yield "kubernetes.node_name", "is missing; access.kubernetes needs it to find the pods on this node"
    if config.loopback_without_tls:
        yield (
            "access.loopback_without_tls",
            "must be off when access.kubernetes is on: forwarded connections come from a socket owned by root",
        )
    address = config.kubernetes_listen
    if address.path is not None:
        yield (
            "access.kubernetes_listen",
            f"{address} is not host:port; callers on a Unix socket are identified without a token",
        )
    elif not address.is_loopback and not config.has_tls:
        yield (
            "access.kubernetes_listen",
            f"{address} is not a loopback address and needs certificates ({', '.join(TLS_KEYS)}): tokens must not be "
            "sent in the clear",
        )


def hook_problems(config: Config) -> Iterable[tuple[str, str]]:
    """Settings of hooks that cannot work."""
    if config.hook_command and (problem := _command_problem(config.hook_command[0])):
        yield "hooks.command", problem
    if len(config.hook_webhooks) > MAX_WEBHOOKS:
        yield "hooks.webhook", f"has {len(config.hook_webhooks)} addresses; at most {MAX_WEBHOOKS} are allowed"
    if config.hook_secret is not None:
        try:
            webhook_secret_in(config.hook_secret.read_bytes())
        except (OSError, ValueError) as exc:
            yield "hooks.webhook_secret", f"{config.hook_secret} {exc}"
    pushes_otlp = config.hook_profiles and parse_profiles(config.hook_profiles).form is not ProfileForm.PYROSCOPE
    if pushes_otlp and not has_otlp():
        yield "hooks.profiles", f"OTLP needs the package opentelemetry-proto; {install_advice('opentelemetry-proto')}"
    if config.hook_profiles_headers is not None:
        try:
            headers_in(config.hook_profiles_headers.read_bytes())
        except (OSError, ValueError) as exc:
            yield "hooks.profiles_headers", f"{config.hook_profiles_headers} {exc}"


def has_otlp() -> bool:
    """Whether the messages of OTLP profiles are installed."""
    try:
        return importlib.util.find_spec("opentelemetry.proto.profiles.v1development") is not None
    except ImportError:  # a package above it is missing
        return False


def _command_problem(program: str) -> str:
    """Why the command cannot or must not be run; "" if it can."""
    path = Path(program)
    if not path.is_absolute():
        return f"{program!r:.80} is not an absolute path; PATH is not searched, and no shell is used"
    try:
        status = path.stat()
    except OSError as exc:
        return f"{path}: {exc.strerror}"
    if not stat.S_ISREG(status.st_mode) or not os.access(path, os.X_OK, effective_ids=True):
        return f"{path} cannot be executed by this user (uid {os.geteuid()}); run chmod +x {path}"
    if status.st_mode & stat.S_IWOTH:
        return f"{path} can be changed by everybody (mode {stat.S_IMODE(status.st_mode):04o}); run chmod o-w {path}"
    return ""


def metrics_problem(config: Config) -> str:
    """Why metrics.listen is refused; "" if it is not."""
    address = config.metrics_listen
    if address is None or config.metrics_allow_remote or is_loopback(address.host):
        return ""
    return (
        f"{address} can be reached from other hosts, which are not authenticated; listen on 127.0.0.1, or set "
        "metrics.allow_remote = true"
    )


def dynolog_problems(config: Config) -> Iterable[tuple[str, str]]:
    """Refused settings about Dynolog's clients."""
    address = config.dynolog_rpc
    if address is None:
        return
    if address.path is None and not (config.dynolog_allow_remote or address.is_loopback):
        yield (
            "dynolog.rpc",
            f"{address} can be reached from other hosts, and Dynolog's protocol does not authenticate them; use "
            "loopback, or set dynolog.allow_remote = true",
        )
    if address.path is None and config.kubernetes:
        yield (
            "dynolog.rpc",
            f"{address} must be unix:/path or empty when access.kubernetes is on: forwarded connections come from a "
            "socket owned by root",
        )


def compat_problems(config: Config) -> Iterable[tuple[str, str]]:
    """Settings of metrics under other names that would have no effect, or too much."""
    if config.metrics_compat != COMPAT_OFF and config.metrics_listen is None:
        yield "metrics.compat", "has no effect without metrics.listen (127.0.0.1:8080 for Dynolog's scrapers)"
    if config.gpu_interval_ns and config.json_log == JSON_LOG_OFF:
        yield "metrics.gpu_interval", "has no effect without metrics.json_log; /metrics includes the GPUs anyway"
    if 0 < config.gpu_interval_ns < SECOND_NS:
        yield "metrics.gpu_interval", "must be 0 or at least 1s: drivers take 40 ms per GPU to measure PCIe traffic"


RULES: tuple[Callable[[Config], Iterable[tuple[str, str]]], ...] = (
    access_problems,
    hook_problems,
    lambda config: [("metrics.listen", problem)] if (problem := metrics_problem(config)) else [],
    dynolog_problems,
    compat_problems,
    lambda config: [("upload.url", problem)] if (problem := missing_package(config.upload_url)) else [],
)


_WIDTH = 100
_HEAD = """\
# kinetod's configuration (TOML). Every key is here, commented out, with its default.
# Durations are "500ms", "5s", "10min"; sizes "128MiB", "8GiB" or a number of bytes.
# Environment variables override this file, and command-line options override both.
# Check it with: kinetod --check-config. Keys marked "reload" take effect on: systemctl reload kinetod
"""


def default_file() -> str:
    """The complete file with the defaults of root's daemon."""
    return _HEAD + "".join(_section(section) for section in SECTIONS)


def _section(section: str) -> str:
    lines = [f"\n# {SECTIONS[section]}\n[{section}]\n"]
    for key in KEYS:
        if key.section == section:
            lines += [f"# {line}\n" for line in (*textwrap.wrap(_comment(key), _WIDTH), _facts(key))]
            lines.append(f"#{key.name.rpartition('.')[2]} = {key.default_text()}\n")
    return "".join(lines)


def _comment(key: SettingSpec) -> str:
    default = f" Default: {key.default_words}." if key.default_words else ""
    return f"{key.meaning[0].upper()}{key.meaning[1:]}.{default}"


def _facts(key: SettingSpec) -> str:
    return f"({key.kind.name}; {key.variable}{'; reload' if key.reload else ''})"


def effective(loaded: LoadedConfig) -> Iterator[str]:
    """One line per key: its value as TOML, and its source."""
    yield f"# file: {loaded.path}" if loaded.path else "# no configuration file"
    values = {key.name: key.show(getattr(loaded.config, key.field)) for key in KEYS}
    width = max(len(name) + len(value) for name, value in values.items() if len(value) <= 40)
    for name, value in values.items():
        yield f"{name} = {value}".ljust(width + 3) + f"  # {loaded.sources[name]}"


# SIGHUP: rereads the configuration and applies what can change without a restart.
# A configuration with errors changes nothing. The service manager is told when a reload begins and ends (Type=notify-
# reload; with Type=notify and ExecReload= it works the same).
log = logging.getLogger(__name__)


class Reloader:
    """Reloads on request, one at a time; requests during a reload cause one more."""

    def __init__(self, settings: Settings, origin: Origin, status: Callable[[], str]) -> None:
        self._settings = settings
        self._origin = origin
        self._status = status
        self._asked = asyncio.Event()

    def ask(self) -> None:
        """Requests a reload; for signal handlers on the event loop."""
        self._asked.set()

    async def run(self) -> None:
        """Carries out requests until it is cancelled."""
        while True:
            await self._asked.wait()
            self._asked.clear()
            notify.reloading()
            try:
                await self.reload()
            except Exception:
                log.exception("the configuration was not reloaded; the previous one stays in use")
            notify.ready(self._status())

    async def reload(self) -> None:
        """Reads the configuration and puts it in force, or logs its problems."""
        try:
            loaded = await asyncio.to_thread(self._origin.load)
        except ConfigError as exc:
            for problem in exc.problems:
                log.error("%s", problem)
            log.error("the configuration has errors and was not reloaded; the previous one stays in use")
            return
        for warning in loaded.warnings:
            log.warning("%s", warning)
        running = self._settings.current
        config, changed, waiting = reloaded(running, loaded.config)
        self._settings.replace(config)
        for key in waiting:
            log.warning("%s takes effect at the next start", _change(key, running, loaded.config))
        for key in changed:
            log.info("%s", _change(key, running, config))
        log.info("the configuration was reloaded: %s changed", times(len(changed), "key"))


def _change(key: SettingSpec, old: Config, new: Config) -> str:
    before, after = (key.show(getattr(config, key.field)) for config in (old, new))
    return f"{key.name}: {before} → {after}"
