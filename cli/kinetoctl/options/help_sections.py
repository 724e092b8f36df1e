"""A command with so many options that its help shows the usual ones, and all of them, under headings, on request."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from kinetoctl.output.console import say_text

HELP_ALL = "--help-all"


class SectionedCommand(click.Command):
    """sections: heading -> names of parameters. What is in none comes last, under "Other options".

    usual: the parameters that --help shows; the others are left to --help-all.
    """

    def __init__(
        self,
        *args: Any,
        sections: Mapping[str, Sequence[str]] | None = None,
        usual: Iterable[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._sections = dict(sections or {})
        self._usual = frozenset(usual)
        self._whole = False
        self.params.append(
            click.Option(
                [HELP_ALL],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=self._show_all,
                help="Show all options and exit.",
            )
        )

    def _show_all(self, ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
        if wanted and not ctx.resilient_parsing:
            self._whole = True
            try:
                say_text(self.get_help(ctx))
            finally:
                self._whole = False
            ctx.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Click's hook: one definition list per heading."""
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        if not self._whole:
            with formatter.section("Options that are used most"):
                formatter.write_dl([record for name, record in records.items() if name in self._usual and record])
            formatter.write_paragraph()
            formatter.write_text(f"`{ctx.command_path} {HELP_ALL}` shows all {len(records)} options.")
            return
        for heading, names in self._sections.items():
            _write(formatter, heading, [records.pop(name) for name in names])
        _write(formatter, "Other options", list(records.values()))


def _write(formatter: click.HelpFormatter, heading: str, records: Sequence[tuple[str, str] | None]) -> None:
    with formatter.section(heading):
        formatter.write_dl([record for record in records if record is not None])
