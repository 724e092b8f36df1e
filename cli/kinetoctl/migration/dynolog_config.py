"""kinetod's configuration file made of Dynolog's: the text, its check by kinetod, and the file."""

import os
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from kinetoctl.client.file_errors import write_errors
from kinetoctl.errors import NotMigrated, NotWritten
from kinetoctl.migration.dynolog_settings import Became, Migrated, toml_value

CHECK = (sys.executable, "-P", "-m", "kinetod", "--check-config", "--config")
CHECK_S = 60.0
_WIDTH = 100
_MODE = 0o644  # nothing in it is secret, and the service's own user must read it
_PREFIX = "KINETOD_"  # of variables that would take precedence over the file
_HEAD = """\
kinetod's configuration, made of Dynolog's by `kinetoctl migrate dynolog`. What is not here has kinetod's default: \
`kinetod --print-default-config` shows all settings. Look through it, then put it at /etc/kinetod/config.toml.
"""
_DOORS = """\
dynolog.log_roots names the folders below which `dyno --log-file` may have traces written; without it they are in the \
store only, where `kinetoctl captures fetch` finds them. The installed service also needs these folders in `roots` of \
/etc/kinetod/writer.toml and in ReadWritePaths= (`systemctl edit kinetod-writer.service`), and its writer enabled: \
`systemctl enable --now kinetod-writer.socket` (docs/dyno.md). dynolog.tracing says who records: kinetod's agent, or \
the process's own libkineto ("kineto"). Both daemons on one host: docs/dynolog.md.
"""


def config_text(found: Migrated, sources: Sequence[Path]) -> str:
    """The file: each setting below the flags that decide it, and what has no setting at the end."""
    lines = [*_comment(_HEAD), *_comment(f"Made of: {', '.join(map(str, sources))}" if sources else "")]
    section = ""
    told: list[Became] = []
    for name, value in found.settings.items():
        begins, _, key = name.rpartition(".")
        if begins != section:
            lines += ["", f"[{begins}]", *(_comment(_DOORS) if begins == "dynolog" else ())]
            section = begins
        deciding = [line for line in found.report if name in line.keys and line not in told]
        told += deciding
        lines += [text for line in deciding for text in _comment(report_line(line))]
        lines.append(f"{key} = {toml_value(value)}")
    if rest := [line for line in found.report if line not in told]:
        lines += ["", *_comment("Without a setting here:")]
        lines += [text for line in rest for text in _comment(report_line(line))]
    return "\n".join(lines) + "\n"


def report_line(line: Became) -> str:
    """What became of a flag, in one line."""
    where = f" ({line.where})" if line.where else ""
    return f"{line.subject}{where}: {line.outcome.value}{f'; {line.note}' if line.note else ''}"


def _comment(text: str) -> Iterator[str]:
    """Lines of a comment, in which nothing can end the line."""
    shown = "".join(char if char.isprintable() else " " for char in text.strip())
    for line in textwrap.wrap(shown, _WIDTH - 2, break_on_hyphens=False):
        yield f"# {line}"


def check_text(text: str, command: Sequence[str] = CHECK) -> None:
    """Has kinetod read the text as its configuration. Raises NotMigrated with what it says."""
    with tempfile.TemporaryDirectory(prefix="kinetoctl-") as folder:
        path = Path(folder) / "config.toml"
        path.write_text(text, "utf-8")
        _check(path, command)


def write_text(text: str, path: Path, *, replace: bool, command: Sequence[str] = CHECK) -> None:
    """Writes the file, whole and only if kinetod takes it. replace: also over an existing file, if it is a regular one.

    Raises NotMigrated, NotWritten.
    """
    if os.path.lexists(path):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise NotWritten(f"{path} is no regular file, and stays; name another one, or for stdout none")
        if not replace:
            raise _exists(path)
    check_text(text, command)
    with write_errors(path):
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        scratch = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fchmod(file.fileno(), _MODE)
                os.fsync(file.fileno())
            if replace:
                scratch.replace(path)
            else:
                _take_name(scratch, path)
        except FileExistsError:
            raise _exists(path) from None
        finally:
            scratch.unlink(missing_ok=True)


def _take_name(scratch: Path, path: Path) -> None:
    """Gives the file its name, unless that has been taken meanwhile. Raises OSError."""
    try:
        os.link(scratch, path)
    except FileExistsError:
        raise
    except OSError:  # no file on this disk may have two names
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
        scratch.replace(path)


def _exists(path: Path) -> NotWritten:
    return NotWritten(f"{path} exists already; --replace writes over it")


def _check(path: Path, command: Sequence[str]) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIX)}
    try:
        done = subprocess.run(
            [*command, str(path)], env=environ, capture_output=True, text=True, errors="replace", timeout=CHECK_S,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NotMigrated(f"kinetod cannot be asked whether it takes the configuration: {exc}") from exc
    if done.returncode:
        said = done.stderr.replace(str(path), "configuration").strip()
        raise NotMigrated(f"kinetod does not take the configuration:\n{said}")
