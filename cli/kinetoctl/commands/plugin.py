"""`kinetoctl plugin`: write, check and list plug-ins for accelerators."""

import json
import os
import re
import shutil
import string
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from kineto_trace.base.own_processes import python

from kinetoctl.base.common_options import LazyGroup, common_options, completed, current
from kinetoctl.client import enum_names
from kinetoctl.client.daemon_client import Client
from kinetoctl.errors import NotWritten, PluginRefused, ProjectExists, UsageProblem
from kinetoctl.exit_codes import ExitCode
from kinetoctl.output.console import emit, plain, print_table, say

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

COMMAND = python("kinetod.plugins.load_process")
DEADLINE_S = 30.0  # kinetod gives it ten
_SIGNS = ("libraries", "device files", "environment", "modules")  # in the order of plugin_bundle.Signs
_MAX_ERRORS = 1000
COLUMNS = ("NAME", "STATE", "VERSION", "PACKAGE", "ACTIVITY TYPES, OR WHY NOT")
_OFF = "not in plugins.sources of kinetod's configuration"
TEMPLATE = Path(__file__).with_name("plugin_template")
_SUFFIX = ".template"
_NAME = re.compile(r"[a-z0-9]{1,40}")  # what may be part of a path; kinetod decides what a plug-in may be called


@click.group("plugin", cls=LazyGroup)
@common_options
def command() -> None:
    """Write, check and list plug-ins for accelerators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPlugin:
    """What a plug-in declares, or why kinetod would refuse it. files: names -> bytes. notes: for people."""

    refused: str = ""
    name: str = ""
    package: str = ""
    version: str = ""
    activity_types: Sequence[str] = ()
    signs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    conflicts: Sequence[str] = ()
    needs_from_start: str = ""
    detach: str = ""
    files: Sequence[str] = ()
    notes: Sequence[str] = ()

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def check_plugin(plugin: str, *, command: Sequence[str] = COMMAND, deadline_s: float = DEADLINE_S) -> CheckedPlugin:
    """plugin: the name of an installed one, or the folder of a project."""
    is_folder = os.sep in plugin or Path(plugin).is_dir()
    question = {"folder": str(Path(plugin).absolute())} if is_folder else {"name": plugin}
    try:
        asked = json.dumps({**question, "unsafe": True}).encode()
        done = subprocess.run(command, input=asked, capture_output=True, timeout=deadline_s, check=False)
    except subprocess.TimeoutExpired:
        return CheckedPlugin(refused=f"loading it did not finish within {deadline_s:g} s")
    except OSError as exc:
        return CheckedPlugin(refused=f"the process that loads it cannot be started: {exc}")
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.decode("utf-8", "replace")[-_MAX_ERRORS:].strip()
        return CheckedPlugin(refused=f"the process that loads it failed (exit status {done.returncode}): {said}")
    return _checked(answer, installed=not is_folder)


def _checked(answer: Mapping[str, Any], *, installed: bool) -> CheckedPlugin:
    if refused := answer.get("refused"):
        return CheckedPlugin(refused=refused)
    untrusted, of_user = answer.get("untrusted", ""), answer.get("of_user", "")
    if untrusted and installed:
        return CheckedPlugin(refused=f"other users could change it: {untrusted}")
    declared = answer["declaration"]
    notes = [f"if it were installed like this, kinetod would refuse it: {untrusted}"] if untrusted else []
    if of_user and not untrusted:
        notes.append(f"only your own kinetod accepts it as it is; the host's kinetod would refuse it: {of_user}")
    return CheckedPlugin(
        name=declared["name"],
        package=answer.get("package", ""),
        version=answer.get("version", ""),
        activity_types=sorted(declared["schema"]["types"]),
        signs={kind: patterns for kind, patterns in zip(_SIGNS, declared["signs"], strict=True) if patterns},
        conflicts=declared["conflicts"],
        needs_from_start=declared["needs_from_start"],
        detach=declared["detach"],
        files=sorted([*answer.get("python", {}), *answer.get("libraries", {})]),
        notes=notes,
    )


# Writes the project of a new plug-in from the files of plugin_template/.
# In those, $name stands for the plug-in's name, and so does NAME in the names of files. The project is written beside
# its place, checked as kinetod would, and then moved there: so no half of one is left, and what is written can be
# installed.
@dataclass(frozen=True, slots=True, kw_only=True)
class PluginProject:
    """A project that was written. files: relative to its folder."""

    folder: Path
    files: list[str]


def write_project(name: str, parent: Path) -> PluginProject:
    """Raises UsageProblem, PluginRefused, ProjectExists, NotWritten."""
    if not _NAME.fullmatch(name):
        raise UsageProblem(f"{name!r:.60} cannot be the name of a plug-in; expected lower-case letters and digits")
    folder = parent / f"kinetod-{name}"
    if folder.exists() or folder.is_symlink():
        raise ProjectExists(f"the folder {folder} already exists; nothing was written")
    try:
        with tempfile.TemporaryDirectory(prefix=f".kinetod-{name}-", dir=parent) as temporary:
            made = Path(temporary, folder.name)
            files = _fill(made, name)
            checked = check_plugin(str(made))
            if checked.refused:
                raise PluginRefused(f"kinetod would refuse a plug-in named {name!r}: {checked.refused}")
            for cache in made.rglob("__pycache__"):
                shutil.rmtree(cache)
            made.rename(folder)
    except OSError as exc:
        raise NotWritten(f"{folder} cannot be written: {exc.strerror}") from exc
    return PluginProject(folder=folder, files=files)


def _fill(made: Path, name: str) -> list[str]:
    files = []
    for template in sorted(TEMPLATE.rglob(f"*{_SUFFIX}")):
        relative = str(template.relative_to(TEMPLATE)).removesuffix(_SUFFIX).replace("NAME", name)
        file = made / relative
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(string.Template(template.read_text()).substitute(name=name, title=name.capitalize()))
        files.append(relative)
    return files


@command.command("new")
@click.argument("name")
@click.option(
    "--output-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    metavar="DIR",
    help="Folder in which to create the project's folder.  [default: .]",
)
@common_options
def new(name: str, output_dir: Path) -> int:
    """Write the project of a new plug-in into the folder kinetod-NAME.

    The plug-in can be installed as it is: it records one activity, and shows where to put the accelerator's own. NAME
    is the accelerator's name: 2 to 16 lower-case letters and digits. Existing files are never overwritten.
    """
    settings = current()
    project = write_project(name, output_dir)
    if settings.output != "table":
        emit({"name": name, "path": str(project.folder), "files": project.files}, settings.output)
        return ExitCode.DONE
    for file in project.files:
        say(str(project.folder / file))
    say(f"`kinetoctl plugin check {project.folder}` shows whether kinetod would accept it.", err=True)
    return ExitCode.DONE


@command.command("check")
@click.argument("plugin", metavar="NAME|FOLDER", shell_complete=completed("plugins"))
@common_options
def check(plugin: str) -> int:
    """Load a plug-in as kinetod would, and report what is wrong with it.

    NAME is an installed plug-in; FOLDER is the project of a plug-in, which need not be installed. It is loaded in a
    process of its own on this machine, with your permissions; no daemon is needed, and no other process is touched. The
    exit code is 5 if kinetod would refuse it.
    """
    settings = current()
    checked = check_plugin(plugin)
    if checked.refused:
        if settings.output != "table":
            emit(checked.plain(), settings.output)
        raise PluginRefused(f"{plugin}: {checked.refused}")
    if settings.output == "table":
        print_table(("NAME", "VALUE"), _rows(checked), color=settings.color)
        for note in checked.notes:
            say(f"note: {note}", err=True)
    else:
        emit(checked.plain(), settings.output)
    return ExitCode.DONE


def _rows(checked: CheckedPlugin) -> list[tuple[str, str]]:
    return [
        ("plug-in", checked.name),
        ("package", f"{checked.package} {checked.version}".strip() or "-"),
        ("activity types", ", ".join(checked.activity_types)),
        *((f"sign: {kind}", ", ".join(patterns)) for kind, patterns in checked.signs.items()),
        ("conflicts", ", ".join(checked.conflicts) or "-"),
        ("needs from start", checked.needs_from_start or "-"),
        ("detach", checked.detach),
        ("files", ", ".join(checked.files)),
    ]


@command.command("list")
@common_options
def list_plugins() -> int:
    """List the plug-ins that are installed alongside the daemon.

    State: on (agents get it), off (installed, but not in the configuration), or refused (in the configuration, but not
    used). The list shows the state when the daemon started.
    """
    settings = current()
    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        plugins = list(client.host().plugins)
    if settings.output != "table":
        emit([plain(plugin) for plugin in plugins], settings.output)
        return ExitCode.DONE
    print_table(COLUMNS, [_row(plugin) for plugin in plugins], color=settings.color)
    if not plugins:
        say("No plug-in is installed alongside the daemon. `kinetoctl plugin new NAME` writes one.", err=True)
    return ExitCode.DONE


def _row(plugin: "pb.Plugin") -> tuple[str, ...]:
    state = enum_names.plugin_state(plugin.state).lower()
    what = plugin.reason or ", ".join(plugin.activity_types) or _OFF
    return (plugin.name, state, plugin.version or "-", plugin.package or "-", what)
