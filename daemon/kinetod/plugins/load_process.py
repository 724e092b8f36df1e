"""`python -m kinetod.plugins.load_process`: a LoadQuestion on standard input, a LoadAnswer on standard output."""

import os
import re
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import msgspec
import tomllib

from kinetod.attach.channel.payload import pieces
from kinetod.base.safe_text import clean
from kinetod.plugins.accelerator import GROUP, Accelerator, check, to_plain
from kinetod.plugins.entry_points import MAX_FILES_BYTES, LoadAnswer, LoadQuestion, NoSuchPlugin, PythonFile, find
from kinetod.plugins.file_trust import ROOT, problem_of, trusted_uids
from kinetod.sandbox.confinement import die_with_parent

_MAX_REASON = 1000
_ANNOTATIONS = re.compile(r"^from __future__ import .*\bannotations\b", re.MULTILINE)


class PluginNotUsed(Exception):
    """A plug-in is not used. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class _Found:
    point: metadata.EntryPoint
    package: str
    version: str
    places: tuple[Path, ...]


def answer(question: LoadQuestion) -> LoadAnswer:
    """Loads the plug-in. Never raises."""
    try:
        found = _in_project(Path(question.folder)) if question.folder else _installed(question.name)
        untrusted = problem_of(found.places, trusted_uids())
        if untrusted and not question.unsafe:
            raise PluginNotUsed(f"other users could change it: {untrusted}")
        accelerator = _loaded(found)
        files = accelerator.agent_files
        return LoadAnswer(
            untrusted=untrusted,
            of_user=problem_of(found.places, ROOT) if question.unsafe else "",
            package=clean(found.package, 80),
            version=clean(found.version, 40),
            declaration=to_plain(accelerator),
            python={name: _python(name, files[name].decode()) for name in files if name.endswith(".py")},
            libraries={name: files[name] for name in files if not name.endswith(".py")},
        )
    except PluginNotUsed as exc:
        return LoadAnswer(refused=clean(str(exc), _MAX_REASON))
    except BaseException as exc:  # noqa: BLE001 - whatever it raises is its own fault
        return LoadAnswer(refused=clean(f"loading it raised {type(exc).__name__}: {exc}", _MAX_REASON))


def _installed(name: str) -> _Found:
    try:
        entry = find(name)
        return _Found(entry.point, entry.package, entry.version, tuple(entry.places()))
    except (NoSuchPlugin, ImportError) as exc:
        raise PluginNotUsed(str(exc)) from exc


def _in_project(folder: Path) -> _Found:
    """The plug-in of a project that may not be installed."""
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        ((name, value),) = project["entry-points"][GROUP].items()
    except OSError as exc:
        raise PluginNotUsed(f"{folder / 'pyproject.toml'} cannot be read: {exc.strerror}") from exc
    except (UnicodeError, tomllib.TOMLDecodeError) as exc:
        raise PluginNotUsed(f"{folder / 'pyproject.toml'} cannot be read: {exc}") from exc
    except (KeyError, ValueError, AttributeError):
        raise PluginNotUsed(
            f'{folder / "pyproject.toml"} must declare exactly one plug-in: one line `NAME = "module:VALUE"` in '
            f'[project.entry-points."{GROUP}"]'
        ) from None
    sys.path[:0] = [str(place.resolve()) for place in (folder / "src", folder) if place.is_dir()]
    point = metadata.EntryPoint(name, str(value), GROUP)
    return _Found(point, str(project.get("name", "")), str(project.get("version", "")), (folder,))


def _loaded(found: _Found) -> Accelerator:
    value = found.point.load()
    try:
        accelerator = check(value)
    except ValueError as exc:
        raise PluginNotUsed(str(exc)) from exc
    if accelerator.name != found.point.name:
        raise PluginNotUsed(
            f"its name is {accelerator.name!r}, but its entry point is {found.point.name!r}; use the same name for both"
        )
    size = sum(map(len, accelerator.agent_files.values()))
    if size > MAX_FILES_BYTES:
        raise PluginNotUsed(f"agent_files: {size} bytes in total, but at most {MAX_FILES_BYTES} can be sent to agents")
    return accelerator


def _python(name: str, text: str) -> PythonFile:
    split = tuple(piece[:2] for piece in pieces(text, name))
    return PythonFile(pieces=split, annotations=bool(_ANNOTATIONS.search(text)))


def main() -> NoReturn:
    """Answers one question, and ends at once: a plug-in may have started threads."""
    die_with_parent()
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadQuestion)
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a plug-in may print
    data = msgspec.json.encode(answer(question)) + b"\n"
    while data:
        data = data[os.write(answers, data) :]
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
