"""A command with so many options that its help shows them under headings."""

from collections.abc import Mapping, Sequence
from typing import Any

import click


class SectionedCommand(click.Command):
    """sections: heading -> names of parameters. What is in none comes last, under "Other options"."""

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sections = dict(sections or {})

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Click's hook: one definition list per heading."""
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        for heading, names in self._sections.items():
            _write(formatter, heading, [records.pop(name) for name in names])
        _write(formatter, "Other options", list(records.values()))


def _write(formatter: click.HelpFormatter, heading: str, records: Sequence[tuple[str, str] | None]) -> None:
    with formatter.section(heading):
        formatter.write_dl([record for record in records if record is not None])
