"""`kinetoctl migrate`: kinetod's configuration from that of another profiler's daemon."""

from collections.abc import Mapping
from pathlib import Path

import click

from kinetoctl import dynolog_migration
from kinetoctl.base.common_options import OUTPUTS, LazyGroup, common_options, current, options_without_form
from kinetoctl.base.unit_file import FlagReader, GivenFlag, UnitFile, find_unit, read_unit
from kinetoctl.dynolog_migration import FLAGS, SWITCHES, FlagOutcome, Migrated, migrated
from kinetoctl.errors import NotMigrated
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output.console import emit, print_table, say, say_text

PROGRAM, UNIT = "dynolog", "dynolog.service"
FLAG_FILE = Path("/etc/dynolog.gflags")  # as its packages have it
_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group("migrate", cls=LazyGroup)
@common_options
def command() -> None:
    """Convert the configuration of another profiler's daemon into one for kinetod."""


@command.command("dynolog")
@click.option(
    "--flags",
    "flag_file",
    metavar="FILE",
    type=_FILE,
    help=f"Dynolog's flag file, instead of the one that the unit names.  [default: the unit's, else {FLAG_FILE}]",
)
@click.option(
    "--unit",
    "unit_path",
    metavar="FILE",
    type=_FILE,
    help=f"Dynolog's systemd unit; its drop-ins are next to it, in FILE.d.  [default: {UNIT} of this host]",
)
@click.option(
    "-o",
    "--output",
    "path",
    metavar="FILE",
    type=_FILE,
    help="File to write.  [default: stdout]",
)
@click.option("--replace", is_flag=True, help="With --output: overwrite an existing file.")
@options_without_form
def dynolog(flag_file: Path | None, unit_path: Path | None, path: Path | None, replace: bool) -> int:
    """Convert Dynolog's flags and unit file into a configuration for kinetod.

    \b
    kinetoctl migrate dynolog                                   print the configuration for this host
    kinetoctl migrate dynolog --output kinetod.toml             write it, and show what became of each flag
    kinetoctl migrate dynolog --flags dynolog.gflags            convert a file from another host
    kinetoctl -o json migrate dynolog                           the settings and the report, for a program

    A comment for each flag shows what became of it: the same, approximated, or no counterpart and why. kinetod itself
    checks the result before anything is written. Dynolog's files are only read, and Dynolog is not touched.
    """
    if path is not None and str(path) in OUTPUTS:
        raise click.UsageError(
            f"--output names the file to write here; use `kinetoctl -o {path} migrate dynolog` to choose the format"
        )
    if replace and path is None:
        raise click.UsageError("--replace needs --output")
    unit, given, files = _read(flag_file, unit_path)
    found = migrated(given, unit.environ if unit else {}, unit.settings if unit else {})
    text = dynolog_migration.config_text(found, files)
    settings = current()
    if path is None:
        dynolog_migration.check_text(text)
        if settings.output == "table":
            say_text(text, nl=False)
        else:
            emit(_plain(found, files), settings.output)
    else:
        dynolog_migration.write_text(text, path, replace=replace)
        if settings.output == "table":
            print_table(("FLAG", "BECAME", "SETTING", "NOTE"), _rows(found), color=settings.color)
        else:
            emit({"path": str(path), **_plain(found, files)}, settings.output)
    if not settings.quiet:
        _tell(found, path)
    return ExitCode.DONE


def _read(flag_file: Path | None, unit_path: Path | None) -> tuple[UnitFile | None, list[GivenFlag], list[Path]]:
    """The unit, if there is one, the flags in their order, and the files that were read. Raises NotMigrated."""
    if unit_path is None and flag_file is None:
        unit_path = find_unit(UNIT)
    unit = read_unit(unit_path, PROGRAM) if unit_path else None
    environ: Mapping[str, str] = unit.environ if unit else {}
    reader = FlagReader(program=PROGRAM, known=FLAGS, switches=SWITCHES, environ=environ, stand_in=flag_file)
    if unit is not None:
        given = reader.command_line(unit.arguments, f"ExecStart of {unit.files[0]}")
        if flag_file is not None and flag_file not in reader.files:
            given += reader.file(flag_file)
        return unit, given, [*unit.files, *reader.files]
    if flag_file is None and not FLAG_FILE.is_file():
        raise NotMigrated(f"this host has neither {UNIT} nor {FLAG_FILE}")
    return None, reader.file(flag_file or FLAG_FILE), reader.files


def _rows(found: Migrated) -> list[tuple[str, str, str, str]]:
    return [
        (
            line.subject,
            line.outcome.value,
            ", ".join(key for key in line.keys if key in found.settings) or "-",
            line.note or "-",
        )
        for line in found.report
    ]


def _plain(found: Migrated, files: list[Path]) -> dict[str, object]:
    report = [
        {
            "flag": line.subject,
            "outcome": line.outcome.value,
            "settings": [key for key in line.keys if key in found.settings],
            "note": line.note,
            "where": line.where,
        }
        for line in found.report
    ]
    return {"files": [str(file) for file in files], "settings": dict(found.settings), "report": report}


def _tell(found: Migrated, path: Path | None) -> None:
    if path is not None:
        say(f"{path}: kinetod accepts it. `kinetod --check-config --config {path}` shows every setting.", err=True)
    close = found.count(FlagOutcome.APPROXIMATED)
    gone = found.count(FlagOutcome.NO_COUNTERPART)
    unknown = found.count(FlagOutcome.UNKNOWN)
    if close or gone or unknown:
        say(
            f"note: {close} approximated, {gone} without a counterpart, {unknown} unknown; see the notes for why",
            err=True,
        )
