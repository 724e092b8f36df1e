"""Which plug-ins are installed beside kinetod. Only metadata is read: nothing of a plug-in runs."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kinetod.plugins.accelerator import GROUP


class NoSuchPlugin(Exception):
    """No plug-in of that name is installed, or more than one. The text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledEntry:
    """An entry point of the group. package, version: of the distribution that has it."""

    name: str
    package: str
    version: str
    point: metadata.EntryPoint

    def places(self) -> Iterator[Path]:
        """Where its code and its declaration lie. Raises ImportError if its module cannot be found."""
        folder = getattr(self.point.dist, "_path", None)  # the standard library's own finder has it
        if folder is not None:
            yield Path(folder)
        top = self.point.module.partition(".")[0]
        spec = importlib.util.find_spec(top)  # of a top-level module: finds it without running anything of it
        if spec is None:
            raise ImportError(f"there is no module {top}")
        yield from map(Path, spec.submodule_search_locations or ())
        if spec.origin is not None:
            yield Path(spec.origin)


def installed(path: Sequence[str] | None = None) -> list[InstalledEntry]:
    """All of them, by name. path: instead of sys.path."""
    found = []
    distributions = metadata.distributions() if path is None else metadata.distributions(path=list(path))
    for distribution in distributions:
        for point in distribution.entry_points.select(group=GROUP):
            name, version = distribution.metadata["Name"] or "", distribution.version
            found.append(InstalledEntry(name=point.name, package=name, version=version, point=point))
    return sorted(found, key=lambda entry: (entry.name, entry.package))


def find(name: str) -> InstalledEntry:
    """The one of that name. Raises NoSuchPlugin."""
    entries = installed()
    found = [entry for entry in entries if entry.name == name]
    distinct = {(entry.package, entry.version): entry for entry in found}
    if len(distinct) > 1:
        packages = ", ".join(f"{entry.package} {entry.version}" for entry in distinct.values())
        raise NoSuchPlugin(f"several packages have a plug-in of this name ({packages}); uninstall all but one")
    if not distinct:
        names = ", ".join(dict.fromkeys(entry.name for entry in entries)) or "none"
        raise NoSuchPlugin(
            f"no package installed beside kinetod has an entry point {name!r} of {GROUP}; there are: {names}; "
            "install it, or correct its name"
        )
    return next(iter(distinct.values()))
