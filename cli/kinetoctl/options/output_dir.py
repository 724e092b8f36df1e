"""The output folder of traces, which is checked before anything is recorded."""

import os
from pathlib import Path

import click

FOLDER = click.Path(path_type=Path, file_okay=False)


def prepare_folder(folder: Path, option: str = "--output-dir") -> Path:
    """Create the folder if it is missing. Raises UsageError if it cannot be created or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise click.UsageError(f"{option}: {folder} cannot be created: {exc.strerror}") from exc
    if not os.access(folder, os.W_OK | os.X_OK):
        raise click.UsageError(f"{option}: {folder} is not writable")
    return folder
