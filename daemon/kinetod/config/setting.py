"""The declaration of one setting, as the default of its field in `settings.Config`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from kinetod.config.value_kinds import Kind

T = TypeVar("T")

VARIABLE_PREFIX = "KINETOD_"
CONFIG_VARIABLE = "KINETOD_CONFIG"  # names the file
METADATA = "setting"  # where a field keeps its declaration


class HostDefault(NamedTuple, Generic[T]):
    """A default that depends on the host or the user; also in words, and as the example file has it: for root."""

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
        """A default that depends on the host, in words; "" for any other."""
        return self.default.words if isinstance(self.default, HostDefault) else ""

    def default_value(self) -> Any:
        """The value if none is configured."""
        return self.default.compute() if isinstance(self.default, HostDefault) else self.default

    def default_text(self) -> str:
        """The default as TOML; where it depends on the user, that of root."""
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
