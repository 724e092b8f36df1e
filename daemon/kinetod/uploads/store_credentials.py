"""Credentials: where a service's credentials file goes, and which parts no message may show (`safe_text.redacted`)."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

_MIN_SECRET_CHARS = 6
_SECRET_NAMES = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|KEY|CREDENTIAL|CONNECTION_STRING|SAS", re.IGNORECASE)
# The variable by which the libraries of a scheme find a file with credentials.
FILE_VARIABLES = {
    "s3": "AWS_SHARED_CREDENTIALS_FILE",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
}
AZURE_VARIABLE = "AZURE_STORAGE_CONNECTION_STRING"  # Azure's libraries read no file: its content goes here


def credential_variables(scheme: str, path: Path) -> dict[str, str]:
    """Environment of a worker that uses this file. Blocking. Raises OSError."""
    if scheme == "az":
        return {AZURE_VARIABLE: path.read_text().strip()}
    return {FILE_VARIABLES[scheme]: str(path)} if scheme in FILE_VARIABLES else {}


def secrets_of(environ: Mapping[str, str] = os.environ) -> frozenset[str]:
    """Values that must never be seen: of variables that sound like secrets, and in files that those name."""
    found = set[str]()
    for name, value in environ.items():
        if _SECRET_NAMES.search(name):
            found.add(value)
        if name in FILE_VARIABLES.values():
            found.update(_in_file(Path(value)))
    return frozenset(value for value in found if len(value) >= _MIN_SECRET_CHARS and not value.startswith("/"))


def _in_file(path: Path) -> Iterable[str]:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return ()
    return re.findall(r"[=:]\s*\"?([^\s\",]{%d,})" % _MIN_SECRET_CHARS, text)
