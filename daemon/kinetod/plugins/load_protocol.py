"""What is asked of the process that loads a plug-in, and what it answers.

Theory of operation
    plugin_loader.py (in the daemon)  starts a process for each plug-in of the allow-list, with a deadline
    load_process.py (the process)     finds it, checks who could change its files, imports it, checks what it declares

    A plug-in that raises, hangs or crashes when it is imported does so there, and is left out.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

MAX_FILES_BYTES = 5 << 20  # of one plug-in: the answer is one line of base64


class LoadQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """Which plug-in: by its entry point, or by the folder of its project.

    unsafe: load it although others could change its files; the answer says so, and also what only a daemon of this
    user takes.
    """

    name: str = ""
    folder: str = ""
    unsafe: bool = False


class PythonFile(msgspec.Struct, frozen=True, kw_only=True):
    """A Python file as agents get it (plugin_bundle.PluginFile)."""

    pieces: tuple[tuple[int, str], ...]
    annotations: bool


class LoadAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One plug-in. refused: why it is not used; then nothing else needs to be there.

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
