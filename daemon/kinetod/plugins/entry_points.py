"""Lists the plug-ins installed beside kinetod. Reads only metadata: nothing of a plug-in runs."""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from kinetod.plugins.accelerator import GROUP

MAX_FILES_BYTES = 5 << 20  # per plug-in: the answer is one line of base64


class NoSuchPlugin(Exception):
    """No plug-in of that name is installed, or more than one. The message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledEntry:
    """An entry point of the group. package, version: of the distribution that has it."""

    name: str
    package: str
    version: str
    point: metadata.EntryPoint

    def places(self) -> Iterator[Path]:
        """Folders and files of its code and declaration. Raises ImportError if its module cannot be found."""
        folder = getattr(self.point.dist, "_path", None)  # set by the standard library's own finder
        if folder is not None:
            yield Path(folder)
        top = self.point.module.partition(".")[0]
        spec = importlib.util.find_spec(top)  # a top-level module: found without running any of it
        if spec is None:
            raise ImportError(f"there is no module {top}")
        yield from map(Path, spec.submodule_search_locations or ())
        if spec.origin is not None:
            yield Path(spec.origin)


def installed(path: Sequence[str] | None = None) -> list[InstalledEntry]:
    """All installed plug-ins, by name. path: replaces sys.path."""
    found = []
    distributions = metadata.distributions() if path is None else metadata.distributions(path=list(path))
    for distribution in distributions:
        for point in distribution.entry_points.select(group=GROUP):
            name, version = distribution.metadata["Name"] or "", distribution.version
            found.append(InstalledEntry(name=point.name, package=name, version=version, point=point))
    return sorted(found, key=lambda entry: (entry.name, entry.package))


def find(name: str) -> InstalledEntry:
    """The plug-in of that name. Raises NoSuchPlugin."""
    entries = installed()
    found = [entry for entry in entries if entry.name == name]
    distinct = {(entry.package, entry.version): entry for entry in found}
    if len(distinct) > 1:
        packages = ", ".join(f"{entry.package} {entry.version}" for entry in distinct.values())
        raise NoSuchPlugin(f"several packages have a plug-in with this name ({packages}); uninstall all but one")
    if not distinct:
        names = ", ".join(dict.fromkeys(entry.name for entry in entries)) or "none"
        raise NoSuchPlugin(
            f"no package installed with kinetod has an entry point {name!r} in the group {GROUP} (available: {names}); "
            "install the plug-in, or correct its name"
        )
    return next(iter(distinct.values()))


# The protocol with the process that loads a plug-in.
#
# plugin_loader.py (in the daemon) starts a process for each plug-in of the allow-list, with a deadline; load_process.py
# (the process) finds it, checks who could change its files, imports it and checks its declaration. A plug-in that
# raises, hangs or crashes during import does so there, and is left out.
class LoadQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """The plug-in to load: by its entry point, or by the folder of its project.

    unsafe: load it although others could change its files; the answer reports that, and what only a daemon of this user
    would accept.
    """

    name: str = ""
    folder: str = ""
    unsafe: bool = False


class PythonFile(msgspec.Struct, frozen=True, kw_only=True):
    """A Python file as sent to agents (plugin_bundle.PluginFile)."""

    pieces: tuple[tuple[int, str], ...]
    annotations: bool


class LoadAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One plug-in. refused: why it is not used; then the other fields may be empty.

    declaration: kinetod.plugins.accelerator.to_plain. python, libraries: its agent_files.
    untrusted: who could change it; of_user: the same for a daemon of another user than this one.
    """

    refused: str = ""
    untrusted: str = ""
    of_user: str = ""
    package: str = ""
    version: str = ""
    declaration: Mapping[str, Any] = {}
    python: Mapping[str, PythonFile] = {}
    libraries: Mapping[str, bytes] = {}
