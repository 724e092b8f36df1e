"""Writes what the declarations of the settings say: `python docs/generate_config.py`.

The settings in docs/configuration.md and the whole of deploy/config/config.toml.
"""

from pathlib import Path

from kinetod.config.config_sources import default_file
from kinetod.config.settings import KEYS
from kinetod.config.value_kinds import SettingSpec

DOCUMENT = Path(__file__).with_name("configuration.md")
EXAMPLE = Path(__file__).parents[1] / "deploy/config/config.toml"
BEGIN = "<!-- settings: made by `python docs/generate_config.py` -->\n"
END = "<!-- end of settings -->\n"
TABLE_HEAD = "| key | type | default | option | variable | reload | meaning |\n|---|---|---|---|---|---|---|\n"


def row(key: SettingSpec) -> str:
    """One setting as a row of the table."""
    default = key.default_words or f"`{key.default_text()}`"
    option = f"`{key.option}`" if key.option else ""
    cells = (f"`{key.name}`", key.kind.name, default, option, f"`{key.variable}`", "yes" if key.reload else "restart")
    return f"| {' | '.join(cells)} | {key.meaning.replace('|', '/')} |\n".replace("<", "&lt;")


def document() -> str:
    """The document with the table as it should be."""
    text = DOCUMENT.read_text()
    head, rest = text.split(BEGIN)
    return head + BEGIN + TABLE_HEAD + "".join(map(row, KEYS)) + END + rest.split(END)[1]


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    EXAMPLE.parent.mkdir(parents=True, exist_ok=True)
    EXAMPLE.write_text(default_file())
