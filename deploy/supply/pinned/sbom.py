"""Writes the CycloneDX bill of materials of an environment: python -m pinned.sbom ENVIRONMENT REPORT OUTPUT

cyclonedx-py says what lies in the environment, with licences and dependencies. Added are the SHA-256 of the file that
each package was installed from (pip's REPORT), which must be one that the lock allows, and the native libraries of
kinetod itself. An environment that holds anything else, or anything without a licence, gets no bill.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .pins import RUNTIME, Pin, normal, read

OURS = "kinetod"
LICENCE = "Apache-2.0"

# Packages of whose metadata cyclonedx-py makes no licence; from the LICENSE in their wheels.
UNNAMED_LICENCES = {"partd": "BSD-3-Clause", "protobuf": "BSD-3-Clause"}

Json = dict[str, Any]


class BillError(Exception):
    """An environment holds what the locks do not account for. The text says what, and what to do."""


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def hashes(digest: str) -> list[Json]:
    """A SHA-256 as CycloneDX has it."""
    return [{"alg": "SHA-256", "content": digest}]


def installed_from(report: Json) -> dict[str, tuple[str, str]]:
    """Version and SHA-256 of the file that pip installed each package from, by normal name."""
    found = {}
    for item in report["install"]:
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        found[normal(item["metadata"]["name"])] = (item["metadata"]["version"], digest)
    return found


def check(name: str, version: str, digest: str, pins: dict[str, Pin]) -> None:
    """Raises BillError unless the lock allows this file for this package."""
    pin = pins.get(name)
    if pin is None:
        raise BillError(f"{name} {version} is in the environment and not in {RUNTIME.name}; renew it: make lock")
    if version != pin.version or digest not in pin.digests:
        raise BillError(f"{name} {version} (SHA-256 {digest}) is not what {RUNTIME.name} pins: {pin.version}")


def native_libraries(environment: Path) -> list[Json]:
    """The libraries that kinetod's own wheel brings, as parts of it."""
    parts = []
    for package in ("kineto_agent", "kineto_trace"):
        for path in sorted(environment.glob(f"lib/python3*/site-packages/{package}/_native/*.so")):
            parts.append(
                {
                    "type": "library",
                    "bom-ref": f"{OURS}/{path.name}",
                    "name": path.name,
                    "hashes": hashes(digest_of(path)),
                    "licenses": [{"license": {"id": LICENCE}}],
                    "properties": [{"name": "file", "value": f"{package}/_native/{path.name}"}],
                }
            )
    if not parts:
        raise BillError(f"{environment} has no native libraries of {OURS}: it was not built there")
    return parts


def completed(bill: Json, files: dict[str, tuple[str, str]], pins: dict[str, Pin], libraries: list[Json]) -> Json:
    """The bill of cyclonedx-py with the hash of every package, and kinetod as what the bill is about."""
    others = []
    for component in bill["components"]:
        name, version = normal(component["name"]), component["version"]
        if files.get(name, ("", ""))[0] != version:
            raise BillError(f"{name} {version} was not installed by pip from a file with a hash")
        digest = files[name][1]
        component["hashes"] = hashes(digest)
        if not component.get("licenses"):
            if name not in UNNAMED_LICENCES:
                raise BillError(f"{name} {version} names no licence: look it up and add it to UNNAMED_LICENCES")
            component["licenses"] = [{"license": {"id": UNNAMED_LICENCES[name]}}]
        if name == OURS:
            bill["metadata"]["component"] = component | {"type": "application", "components": libraries}
        else:
            check(name, version, digest, pins)
            others.append(component)
    if "component" not in bill["metadata"]:
        raise BillError(f"{OURS} is not in the environment")
    return bill | {"components": others}


def made_by_tool(environment: Path) -> Json:
    """What cyclonedx-py finds in an environment. Two runs over the same one give the same."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "bill.json"
        command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
        subprocess.run([*command, "--output-file", str(output), str(environment)], check=True)
        bill: Json = json.loads(output.read_text())
        return bill


def validate(text: str) -> None:
    """Raises BillError where the text breaks the CycloneDX schema. The tool's own checker looks."""
    from cyclonedx.schema import SchemaVersion  # type: ignore[import-not-found,unused-ignore]  # only where bills are made
    from cyclonedx.validation.json import JsonStrictValidator  # type: ignore[import-not-found,unused-ignore]

    version = SchemaVersion.from_version(json.loads(text)["specVersion"])
    error = JsonStrictValidator(version).validate_str(text)
    if error is not None:
        raise BillError(f"the bill of materials breaks its schema: {error}")


def main(arguments: list[str] | None = None) -> int:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path)
    parser.add_argument("report", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args(arguments)
    try:
        files = installed_from(json.loads(options.report.read_text()))
        libraries = native_libraries(options.environment)
        bill = completed(made_by_tool(options.environment), files, read(RUNTIME), libraries)
        text = json.dumps(bill, indent=1, sort_keys=True) + "\n"
        validate(text)
    except BillError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
