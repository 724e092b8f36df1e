"""Chooses what a process's libkineto is to call its file, and by which number the file is known."""

import secrets

from kinetod.captures.kineto_target.config_text import TraceDestination
from kinetod.kineto_files.trace_location import DEFAULT_FOLDER

_ID_BITS = 63  # libkineto keeps the number as text, readers of JSON as int64


def new_destination(capture_id: str) -> TraceDestination:
    """A file whose name nobody can guess: others may write into the folder, too, and could put a link there first.

    The folder is libkineto's default until the process's own is known.
    """
    stem = f"kinetod-{capture_id}-{secrets.token_hex(8)}"
    return TraceDestination(folder=DEFAULT_FOLDER, stem=stem, trace_id=secrets.randbits(_ID_BITS))
