"""Looks for known vulnerabilities in what the locks pin: python -m pinned.audit [--advisories FOLDER]

pip-audit asks osv.dev, or with --advisories (or KINETO_ADVISORIES) the folder of an OSV export. Exits with

  0  every package was looked up, and nothing is known against any
  1  something is known
  2  not every package was looked up, so nothing is said about the rest

pip-audit itself exits with 0 and "No known vulnerabilities found" for packages that it could not look up.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .advisories import by_package, served
from .pins import BUILD, RUNTIME, Pin, normal, read

NOTHING_KNOWN, SOMETHING_KNOWN, NOT_CHECKED = range(3)
VARIABLE = "KINETO_ADVISORIES"
TIMEOUT_S = 15  # of one question

Json = dict[str, Any]


class NotChecked(Exception):
    """There is no answer about some package, or about any. The text says why."""


@contextmanager
def source(folder: Path | None) -> Iterator[list[str]]:
    """The arguments that tell pip-audit where advisories are."""
    if folder is None:
        yield ["--vulnerability-service", "osv"]
        return
    known = by_package(folder) if folder.is_dir() else {}
    if not known:
        raise NotChecked(f"{folder} holds no advisory about a package of PyPI; unpack OSV's export for PyPI there")
    every = {record["id"]: record.get("modified", "") for several in known.values() for record in several}
    print(f"{folder}: {len(every)} advisories, the newest of {max(every.values())[:10] or 'an unknown day'}")
    with served(known) as url:
        yield ["--vulnerability-service", "osv", "--osv-url", url]


def looked_up(pins: list[Pin], where: list[str]) -> list[Json]:
    """pip-audit's answer for each pin. Raises NotChecked where one is missing."""
    with tempfile.TemporaryDirectory() as folder:
        # Without markers and hashes: what is pinned for another Python counts as well.
        listed = Path(folder) / "pins.txt"
        listed.write_text("".join(f"{pin.name}=={pin.version}\n" for pin in pins))
        command = [sys.executable, "-m", "pip_audit", "--requirement", str(listed), "--no-deps", "--disable-pip"]
        command += ["--format", "json", "--progress-spinner", "off", "--timeout", str(TIMEOUT_S)]
        command += ["--cache-dir", folder]
        done = subprocess.run([*command, *where], capture_output=True, text=True, check=False)
    try:
        answers: list[Json] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        why = (done.stderr.strip() or f"pip-audit ended with {done.returncode}").splitlines()[-1]
        raise NotChecked(f"the advisory service did not answer: {why[:300]}") from None
    checked = {normal(each["name"]) for each in answers if "vulns" in each}
    missing = [pin.name for pin in pins if pin.name not in checked]
    if missing:
        raise NotChecked(f"the advisory service has no answer about {', '.join(missing)}")
    return answers


def report(lock: Path, answers: list[Json]) -> int:
    """Prints what is known; returns how many vulnerabilities that is."""
    count = 0
    for each in answers:
        for vulnerability in each["vulns"]:
            count += 1
            fixed = ", ".join(vulnerability["fix_versions"]) or "no version"
            print(f"{lock.name}: {each['name']} {each['version']}: {vulnerability['id']}, fixed in {fixed}")
    print(f"{lock.name}: {len(answers)} packages looked up, {count} known vulnerabilities")
    return count


def main(arguments: list[str] | None = None) -> int:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = os.environ.get(VARIABLE)
    parser.add_argument("--advisories", type=Path, default=Path(named) if named else None)
    parser.add_argument("locks", type=Path, nargs="*", default=[RUNTIME, BUILD])
    options = parser.parse_args(arguments)
    try:
        with source(options.advisories) as where:
            count = sum(report(lock, looked_up(list(read(lock).values()), where)) for lock in options.locks)
    except NotChecked as exc:
        print(f"NOT CHECKED for vulnerabilities: {exc}", file=sys.stderr)
        return NOT_CHECKED
    return SOMETHING_KNOWN if count else NOTHING_KNOWN


if __name__ == "__main__":
    sys.exit(main())
