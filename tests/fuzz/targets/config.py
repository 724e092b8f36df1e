"""The configuration file and a variable: what `kinetod --check-config` does with them, and what a reload would."""

import random
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kinetod.config.config_sources import ConfigError, Origin, default_file, effective, reloaded
from kinetod.config.settings import KEYS

from fuzz import mutate
from fuzz.parts import joined, parted

WORDS = (
    "[", "]", "[[", "]]", "{", "}", "=", "'''", '"""', "\n", "#", "\\u0000", "\\ud800", "0x", "1e999", "inf", "-nan",
    "1979-05-27T07:32:00Z", "true", "[1, ", "[access]\n", "[access.certificates]\n", '"CN:x" = "admin"\n',
    "a.b.c = 1\n",
    "\ufeff", "\x00", "\x7f", "\r", '"a"."b" = 2\n', "9" * 5000, "{a = {a = {a = 1}}}", "10s", "5GiB", "-1s", "1/0",
)  # fmt: skip


def originals() -> list[str]:
    """Files that are right: the default one, all keys switched on, and every key alone."""
    whole = default_file()
    switched = re.sub(r"(?m)^# ?([a-z_]+ = )", r"\1", whole)
    return [whole, switched, *(f"[{key.name.rpartition('.')[0]}]\n{_line(key.name)}" for key in KEYS)]


def _line(name: str) -> str:
    key = next(each for each in KEYS if each.name == name)
    return f"{name.rpartition('.')[2]} = {key.kind.show(key.default_value()) or repr('')}\n"


ORIGINALS = originals()
_folder = Path(tempfile.mkdtemp(prefix="fuzz-config-"))
_RUNNING = Origin(named_file=None, environ={"HOME": str(_folder)}).load().config


def play(data: bytes) -> None:
    """Loaded, or refused with a place; never anything else."""
    text, variable = parted(data, 2)
    path = _folder / "config.toml"
    path.write_bytes(text)
    environ = {"HOME": str(_folder)}
    name, _, value = variable.decode("utf-8", "replace").partition("=")
    if name and "\0" not in name + value:  # no process can have such a variable
        environ[name] = value
    try:
        loaded = Origin(named_file=path, environ=environ).load()
    except ConfigError as exc:
        assert exc.problems and all(each.where and each.text for each in exc.problems), exc.problems
        return
    assert len(list(effective(loaded))) > len(KEYS), "nothing is in force"
    reloaded(_RUNNING, loaded.config)


def mutated(_data: bytes, rng: random.Random) -> bytes:
    """A file that was right, changed as people do, and a variable."""
    data = _text(rng).encode("utf-8", "surrogatepass")
    if rng.random() < 0.25:
        data = mutate.damaged(data, rng)
    variable = f"{rng.choice(KEYS).variable}={mutate.text(rng)}" if rng.random() < 0.3 else ""
    return joined(data, variable.encode("utf-8", "replace"))


def seeds() -> Iterator[bytes]:
    """A file with everything switched on, and some keys alone."""
    yield ORIGINALS[1].encode()
    for number, text in enumerate(ORIGINALS[2::9]):
        yield joined(text.encode(), f"{KEYS[number].variable}=5".encode())


def _text(rng: random.Random) -> str:
    lines = rng.choice(ORIGINALS).splitlines(keepends=True)
    for _ in range(rng.randrange(1, 5)):
        at, action = rng.randrange(len(lines) + 1), rng.randrange(6)
        if action == 0 and at < len(lines):
            del lines[at]
        elif action == 1:
            lines[at:at] = rng.choice(ORIGINALS).splitlines(keepends=True)[:6]
        elif action == 2:
            lines.insert(at, rng.choice(WORDS))
        elif action == 3:
            lines.insert(at, _strange(rng))
        elif action == 4:
            lines.insert(at, f"{rng.choice(KEYS).name} = {rng.choice(WORDS)}\n")
        elif lines and at < len(lines):
            place = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:place] + rng.choice(WORDS) + lines[at][place:]
    return "".join(lines)


def _strange(rng: random.Random) -> str:
    """A known key with a value that it does not expect."""
    key = rng.choice(KEYS)
    section, _, last = key.name.rpartition(".")
    shown = rng.choice(
        (str(mutate.number(rng)), _quoted(mutate.text(rng)), f"[{_quoted(mutate.text(rng))}]", "{}", "1.5", "false")
    )
    return f"[{section}]\n{last} = {shown}\n"


def _quoted(text: str) -> str:
    escaped = "".join(c if 32 <= ord(c) < 127 and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return f'"{escaped}"'
