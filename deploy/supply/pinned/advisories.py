"""Advisories in a folder, answered to pip-audit as osv.dev does: over loopback, one question for each package.

The folder holds what OSV exports for PyPI: JSON files, or zip files of them, at any depth. A record concerns a version
that it lists, or that lies between the events of one of its ranges (OSV schema, "evaluation").
"""

import json
import threading
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from .pins import normal

Json = dict[str, Any]
LIMIT_BYTES = 64 << 10  # of a question


def records(folder: Path) -> Iterator[Json]:
    """Every record of the folder, withdrawn ones left out."""
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".json":
            yield from usable(path.read_bytes())
        elif path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    if name.endswith(".json"):
                        yield from usable(archive.read(name))


def usable(text: bytes) -> Iterator[Json]:
    """The record of a file, if it is one that counts, with normal names: pip-audit compares them as they are."""
    record = json.loads(text)
    if isinstance(record, dict) and "id" in record and "affected" in record and "withdrawn" not in record:
        for each in filter(of_pypi, record["affected"]):
            each["package"]["name"] = normal(each["package"]["name"])
        yield record


def by_package(folder: Path) -> dict[str, list[Json]]:
    """The records by the normal names of the PyPI packages that they concern."""
    found: dict[str, list[Json]] = defaultdict(list)
    for record in records(folder):
        for name in sorted({each["package"]["name"] for each in record["affected"] if of_pypi(each)}):
            found[name].append(record)
    return found


def of_pypi(affected: Json) -> bool:
    """Whether a part of a record is about a package of PyPI."""
    return str(affected.get("package", {}).get("ecosystem", "")).partition(":")[0] == "PyPI"


def concerns(affected: Json, version: str) -> bool:
    """Whether a part of a record concerns this version."""
    if version in affected.get("versions", ()):
        return True
    ranges = [each for each in affected.get("ranges", ()) if each["type"] == "ECOSYSTEM"]
    return any(within(each["events"], Version(version)) for each in ranges)


def within(events: list[dict[str, str]], version: Version) -> bool:
    """Whether a version lies between the events of a range."""
    inside = False
    for kind, place in sorted(((kind, at) for event in events for kind, at in event.items()), key=order):
        if kind == "introduced" and (place == "0" or version >= Version(place)):
            inside = True
        elif (kind == "fixed" and version >= Version(place)) or (kind == "last_affected" and version > Version(place)):
            inside = False
    return inside


def order(event: tuple[str, str]) -> tuple[bool, Version, bool]:
    """Events in the order of their versions; 0 comes before all, and at one version a beginning after an end."""
    kind, place = event
    if place == "0":
        return (False, Version("0"), False)
    return (True, Version(place), kind == "introduced")


def answer(known: dict[str, list[Json]], name: str, version: str) -> Json:
    """What osv.dev would answer. Raises InvalidVersion for what is no version."""
    wanted = normal(name)
    Version(version)
    hits = [
        record
        for record in known.get(wanted, ())
        if any(
            of_pypi(each) and each["package"]["name"] == wanted and concerns(each, version)
            for each in record["affected"]
        )
    ]
    return {"vulns": hits} if hits else {}


@contextmanager
def served(known: dict[str, list[Json]]) -> Iterator[str]:
    """Answers questions on loopback; the URL for pip-audit."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            """One question: a package and its version."""
            size = min(int(self.headers.get("Content-Length", "0")), LIMIT_BYTES)
            try:
                asked = json.loads(self.rfile.read(size))
                body = json.dumps(answer(known, asked["package"]["name"], asked["version"])).encode()
                self.send_response(200)
            except (ValueError, KeyError, TypeError, InvalidVersion):
                body = b"{}"
                self.send_response(400)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Says nothing: pip-audit reports."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, name="advisories", daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/query"
        finally:
            server.shutdown()
            thread.join()
