"""Loads a plug-in in the process in which kinetod would load it, with the rights of whoever asks."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, "-P", "-m", "kinetod.plugins.load_process")
DEADLINE_S = 30.0  # kinetod gives it ten
_SIGNS = ("libraries", "device files", "environment", "modules")  # in the order of plugin_bundle.Signs
_MAX_ERRORS = 1000


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
        return CheckedPlugin(refused=f"loading it did not end within {deadline_s:g} s")
    except OSError as exc:
        return CheckedPlugin(refused=f"the process that loads it cannot be started: {exc}")
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.decode("utf-8", "replace")[-_MAX_ERRORS:].strip()
        return CheckedPlugin(refused=f"loading it ended its process (exit status {done.returncode}): {said}")
    return _checked(answer, installed=not is_folder)


def _checked(answer: Mapping[str, Any], *, installed: bool) -> CheckedPlugin:
    if refused := answer.get("refused"):
        return CheckedPlugin(refused=refused)
    untrusted, of_user = answer.get("untrusted", ""), answer.get("of_user", "")
    if untrusted and installed:
        return CheckedPlugin(refused=f"others could change it: {untrusted}")
    declared = answer["declaration"]
    notes = [f"installed like this, kinetod would refuse it: {untrusted}"] if untrusted else []
    if of_user and not untrusted:
        notes.append(f"only a kinetod of your own takes it as it is; that of the host would refuse it: {of_user}")
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
