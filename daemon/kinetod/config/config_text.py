"""The configuration as text: the commented file with all defaults, and the effective values with their sources."""

import textwrap
from collections.abc import Iterator

from kinetod.config.config_sources import LoadedConfig
from kinetod.config.setting import SettingSpec
from kinetod.config.settings import KEYS, SECTIONS

_WIDTH = 100
_HEAD = """\
# kinetod's configuration (TOML). Every key is here, commented out, with its default.
# Durations are "500ms", "5s", "10min"; sizes "128MiB", "8GiB" or a number of bytes.
# The environment variable of each key takes precedence over this file, a command-line option over both.
# Check it with: kinetod --check-config. Keys marked "reload" take effect on: systemctl reload kinetod
"""


def default_file() -> str:
    """The complete file with the defaults that root's daemon has."""
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
    """One line per key: its value as TOML, and where it comes from."""
    yield f"# file: {loaded.path}" if loaded.path else "# no configuration file"
    values = {key.name: key.show(getattr(loaded.config, key.field)) for key in KEYS}
    width = max(len(name) + len(value) for name, value in values.items() if len(value) <= 40)
    for name, value in values.items():
        yield f"{name} = {value}".ljust(width + 3) + f"  # {loaded.sources[name]}"
