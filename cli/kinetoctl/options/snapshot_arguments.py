"""Memory snapshots that are named on the command line: files, folders, patterns, traces with one beside them, captures.

The trace library is imported in functions only, so that commands which do not need it start at once.
"""

import glob
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kineto_trace.store.output_formats import ATTACHMENTS

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.base.temporary_folders import removable_folder
from kinetoctl.errors import NoSuchTrace, NotFound
from kinetoctl.options.trace_arguments import CAPTURE_ID, fetch_format

SNAPSHOT_FORMAT = ATTACHMENTS["memory_snapshot"]
_FOLDER_PREFIX = "kinetoctl-"


def all_snapshots(arguments: Sequence[str]) -> bool:
    """Whether all of these arguments are files that may be snapshots."""
    from kineto_trace.snapshots.snapshot_files import is_snapshot_file

    paths = [Path(match) for text in arguments for match in glob.glob(text, recursive=True) or [text]]  # noqa: PTH207 - absolute patterns too
    return bool(paths) and all(map(is_snapshot_file, paths))


def snapshot_paths(arguments: Sequence[str], settings: CommonOptions, stack: ExitStack) -> list[Path]:
    """The snapshots that these arguments name. Downloaded files exist until the stack is closed.

    Raises NotFound and the client's errors for captures.
    """
    from kineto_trace.snapshots.snapshot_files import snapshots_at

    found: list[Path] = []
    for text in arguments:
        if not Path(text).exists() and CAPTURE_ID.fullmatch(text):
            found += _of_capture(text, settings, stack)
            continue
        here = snapshots_at(text)
        if not here:
            raise NoSuchTrace(f"there is no memory snapshot at {text}")
        found += here
    return list(dict.fromkeys(found))


def has_snapshot(capture: Any) -> bool:
    """Whether a capture has a memory snapshot."""
    return any(file.format == SNAPSHOT_FORMAT for target in capture.targets for file in target.files)


def fetch_snapshots(client: Any, capture: Any, settings: CommonOptions, folder: Path) -> list[Path]:
    """Downloads the snapshots of a capture and verifies them. Raises NotFound and the client's errors."""
    if not has_snapshot(capture):
        raise NotFound(
            f"capture {capture.id} has no memory snapshot: `kinetoctl memory` takes one, and so does "
            "`kinetoctl trace --activities kernel,memory_snapshot`"
        )
    return fetch_format(client, capture, settings, folder, SNAPSHOT_FORMAT)


def _of_capture(capture_id: str, settings: CommonOptions, stack: ExitStack) -> list[Path]:
    from kinetoctl.client.daemon_client import Client  # files need no gRPC

    with Client(settings.address, timeout_s=settings.timeout_s) as client:
        capture = client.capture(capture_id)
        folder = stack.enter_context(removable_folder(_FOLDER_PREFIX))
        return fetch_snapshots(client, capture, settings, folder)
