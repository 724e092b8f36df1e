"""The declaration of one setting."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from kinetod.config.settings import Config
from kinetod.config.value_kinds import Kind

VARIABLE_PREFIX = "KINETOD_"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSpec:
    """One setting; see the top of `settings_table`."""

    name: str
    field: str
    kind: Kind
    meaning: str
    option: str = ""
    reload: bool = False
    computed: Callable[[], Any] | None = None
    says: str = ""
    shown: str = ""
    off_switch: bool = False
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

    def default(self) -> Any:
        """The value if none is configured."""
        return self.computed() if self.computed is not None else _DEFAULTS[self.field]

    def default_text(self) -> str:
        """The default as TOML; where it depends on the user, that of root."""
        return self.shown or self.kind.show(self.default())

    def show(self, value: Any) -> str:
        """The value as TOML, with secrets hidden."""
        return '"(not shown)"' if self.secret and value else self.kind.show(value)

    def parse(self, text: str) -> Any:
        """Parses the text of an option or variable. Raises ValueError."""
        value = self.kind.parse(text)
        return not value if self.off_switch else value


_DEFAULTS = {field.name: field.default for field in fields(Config)}
