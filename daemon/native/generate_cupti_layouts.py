"""Developer tool: writes the tables of CUPTI's record layouts from the vendor's public headers.

    python daemon/native/generate_cupti_layouts.py [--keep FOLDER]

Theory of operation
    A CUPTI activity record carries its kind, but neither its size nor its layout: both depend on the
    version of the library (cuptiGetVersion). The public headers in the `nvidia-cuda-cupti*` wheels say
    which structure a version writes: the newest one of its `cupti_activity.h`. For each wheel this tool
    compiles a small C program that prints offsetof, sizeof of the fields that we read, and writes

    daemon/kineto_trace/decode/cupti_layouts.py     everything, for the decoder
    agent/kineto_agent/sources/cupti/known_versions.py    what the collector needs: versions, offset of the name

    Only numbers and field names are kept; the headers stay in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
PART_CHARS = 108  # of a dictionary on one line of a module
ROOT = Path(__file__).resolve().parents[2]
LAYOUTS_FILE = ROOT / "daemon/kineto_trace/decode/cupti_layouts.py"
VERSIONS_FILE = ROOT / "agent/kineto_agent/sources/cupti/known_versions.py"

# Wheels with headers: (distribution, version). All that exist, since a patch release may change the version number.
CUPTI_12 = (
    "12.0.90 12.0.146 12.1.62 12.1.105 12.2.60 12.2.131 12.2.142 12.3.52 12.3.101 12.4.99 12.4.127 "
    "12.5.39 12.5.82 12.6.37 12.6.68 12.6.80 12.8.57 12.8.90 12.9.19 12.9.79"
)
CUPTI_13 = "13.0.48 13.0.85 13.1.75 13.1.115 13.2.23 13.2.75 13.2.86 13.3.35 13.3.75 13.4.58 13.4.92 13.5.25"
WHEELS = [("nvidia-cuda-cupti-cu12", version) for version in CUPTI_12.split()] + [
    ("nvidia-cuda-cupti", version) for version in CUPTI_13.split()
]
# cuda.h, which cupti_activity.h includes: one per major version is enough.
CUDA_WHEELS = {"12": ("nvidia-cuda-runtime-cu12", "12.9.79"), "13": ("nvidia-cuda-runtime", "13.4.92")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One kind of record: its name here, the family of C structures and the width in bytes of each field."""

    name: str
    struct: str
    fields: dict[str, int]
    optional: frozenset[str] = frozenset()


_GPU = {"start": 8, "end": 8, "deviceId": 4, "contextId": 4, "streamId": 4, "correlationId": 4}
_GRAPH = {"graphNodeId": 8, "graphId": 4, "channelID": 4, "channelType": 4}
_COPY = {"copyKind": 1, "srcKind": 1, "dstKind": 1, "bytes": 8}
RECORDS = (
    Record(
        name="KERNEL",
        struct="Kernel",
        fields=_GPU
        | {"name": 8, "registersPerThread": 2, "staticSharedMemory": 4, "dynamicSharedMemory": 4, "queued": 8}
        | {f"{what}{axis}": 4 for what in ("grid", "block") for axis in "XYZ"}
        | _GRAPH
        | {"priority": 4},
        optional=frozenset({"priority"}),
    ),
    Record(name="MEMCPY", struct="Memcpy", fields=_GPU | _COPY | _GRAPH),
    Record(
        name="MEMCPY2",
        struct="MemcpyPtoP",
        fields=_GPU | _COPY | {"srcDeviceId": 4, "srcContextId": 4, "dstDeviceId": 4, "dstContextId": 4} | _GRAPH,
    ),
    Record(name="MEMSET", struct="Memset", fields=_GPU | {"bytes": 8, "memoryKind": 2} | _GRAPH),
    Record(name="API", struct="API", fields={"cbid": 4, "start": 8, "end": 8, "threadId": 4, "correlationId": 4}),
    Record(
        name="SYNCHRONIZATION",
        struct="Synchronization",
        fields={"type": 4, "start": 8, "end": 8, "correlationId": 4, "contextId": 4, "streamId": 4, "cudaEventId": 4},
    ),
    Record(
        name="CUDA_EVENT", struct="CudaEvent", fields={"correlationId": 4, "contextId": 4, "streamId": 4, "eventId": 4}
    ),
    Record(name="OVERHEAD", struct="Overhead", fields={"overheadKind": 4, "start": 8, "end": 8}),
    Record(name="EXTERNAL_CORRELATION", struct="ExternalCorrelation", fields={"externalId": 8, "correlationId": 4}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What one record kind looks like in one version."""

    struct: str
    size: int
    offsets: tuple[tuple[str, int], ...]


def download(distribution: str, version: str, folder: Path) -> Path:
    """Fetches one wheel by name and unpacks its headers. Returns the include folder."""
    target = folder / f"{distribution}-{version}"
    if not target.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--only-binary=:all:", "--platform=manylinux2014_x86_64", "--platform=manylinux_2_25_x86_64"]
        command += ["--platform=manylinux1_x86_64", f"--dest={target}", f"{distribution}=={version}"]
        subprocess.run(command, check=True)
        with zipfile.ZipFile(next(target.glob("*.whl"))) as wheel:
            wheel.extractall(target, [name for name in wheel.namelist() if name.endswith(".h")])
    marker = "cupti_activity.h" if "cupti" in distribution else "cuda.h"
    return next(target.rglob(marker)).parent


def newest(header: str, family: str) -> str:
    """The structure with the highest number: the one that the library of this header writes; "": it has none."""
    numbers = re.findall(rf"^\}} CUpti_Activity{family}(\d*);", header, re.MULTILINE)
    if not numbers:
        return ""
    return f"CUpti_Activity{family}{max(numbers, key=lambda text: int(text or 1))}"


def program(header: str) -> str:
    """A C program that prints one JSON object: API version and the layout of every record kind."""
    lines = ["#include <stddef.h>", "#include <stdio.h>", "#include <cupti_version.h>", "#include <cupti_activity.h>"]
    lines.append('int main(void) { printf("{\\"version\\": %d", (int)CUPTI_API_VERSION);')
    for record in RECORDS:
        struct = newest(header, record.struct)
        if not struct:
            continue
        lines.append(
            f'printf(", \\"{record.name}\\": {{\\"struct\\": \\"{struct}\\", \\"size\\": %zu", sizeof({struct}));'
        )
        for field, width in record.fields.items():
            if field in record.optional and not has_field(header, struct, field):
                continue
            lines.append(f'_Static_assert(sizeof((({struct} *)0)->{field}) == {width}, "{struct}.{field}");')
            lines.append(f'printf(", \\"{field}\\": %zu", offsetof({struct}, {field}));')
        lines.append('printf("}");')
    lines.append('printf("}"); return 0; }')
    return "\n".join(lines)


def has_field(header: str, struct: str, field: str) -> bool:
    """Whether the structure's text declares the field."""
    end = header.index(f"}} {struct};")
    start = header.rindex("typedef struct", 0, end)
    return re.search(rf"\b{field};", header[start:end]) is not None


def measure(include: Path, cuda: Path, scratch: Path) -> tuple[int, dict[str, Layout]]:
    """Compiles and runs the program against one version's headers."""
    stub = scratch / "stub"
    stub.mkdir(exist_ok=True)
    (stub / "builtin_types.h").write_text("")  # cupti_callbacks.h includes it, nothing here needs it
    source, binary = scratch / "layout.c", scratch / "layout"
    source.write_text(program((include / "cupti_activity.h").read_text(encoding="latin-1")))
    subprocess.run(["cc", "-w", "-I", stub, "-I", include, "-I", cuda, source, "-o", binary], check=True)
    result = json.loads(subprocess.run([binary], check=True, capture_output=True).stdout)
    version = result.pop("version")
    layouts = {
        name: Layout(struct=values.pop("struct"), size=values.pop("size"), offsets=tuple(values.items()))
        for name, values in result.items()
    }
    return version, layouts


def collect(folder: Path) -> tuple[dict[int, dict[str, Layout]], dict[int, str]]:
    """All versions: layouts and the CUDA releases that carry each. Two wheels of one version must agree."""
    cuda = {major: download(*wheel, folder) for major, wheel in CUDA_WHEELS.items()}
    tables: dict[int, dict[str, Layout]] = {}
    releases: dict[int, list[str]] = {}
    for distribution, release in WHEELS:
        version, layouts = measure(download(distribution, release, folder), cuda[release.split(".")[0]], folder)
        if tables.setdefault(version, layouts) != layouts:
            sys.exit(f"{distribution} {release}: version {version} has two layouts")
        releases.setdefault(version, []).append(release)
    return tables, {version: release_text(names) for version, names in releases.items()}


def release_text(wheel_versions: list[str]) -> str:
    """'12.8' for one CUDA release, '12.0, 12.1' for several."""
    return ", ".join(dict.fromkeys(version.rsplit(".", 1)[0] for version in wheel_versions))


def packed(numbers: Mapping[str, int]) -> str:
    """A dictionary as source text of few lines: several short ones that are joined."""
    parts: list[dict[str, int]] = [{}]
    for name, value in numbers.items():
        if len(json.dumps(parts[-1] | {name: value})) > PART_CHARS:
            parts.append({})
        parts[-1][name] = value
    return " | ".join(map(json.dumps, parts))


def record_sets(variables: Mapping[T, Mapping[str, str]]) -> tuple[list[str], dict[T, str]]:
    """Source text of the sets of records, each but the first as what it changes in the one before; and each version's.

    variables: version -> kind -> the variable of its layout.
    """
    lines: list[str] = []
    names: dict[T, str] = {}
    known: list[Mapping[str, str]] = []
    for version, records in variables.items():
        if records not in known:
            before = known[-1] if known else {}
            changed = {kind: name for kind, name in records.items() if before.get(kind) != name}
            base = f"_RECORDS_{len(known)} | " if known else ""
            known.append(records)
            text = ", ".join(f'"{kind}": {name}' for kind, name in changed.items())
            lines.append(f"_RECORDS_{len(known)} = {base}{{{text}}}")
        names[version] = f"_RECORDS_{known.index(records) + 1}"
    return lines, names


def render_layouts(tables: dict[int, dict[str, Layout]], releases: dict[int, str]) -> str:
    """The decoder's module."""
    names: dict[tuple[str, Layout], str] = {}
    out = [
        '"""Layouts of CUPTI activity records by library version.',
        "",
        "Generated by daemon/native/generate_cupti_layouts.py.",
        "Each record layout is the size in bytes and the byte offset of each field, under the vendor's field name.",
        "Identical layouts are shared by versions. The widths of the fields are the same in all versions.",
        '"""',
        "",
        "from typing import NamedTuple",
        "",
        "",
        "class RecordLayout(NamedTuple):",
        '    """One kind of record: bytes of a record and byte offsets of the fields that we read."""',
        "",
        "    size: int",
        "    offsets: dict[str, int]",
        "",
        "",
        "class VersionLayout(NamedTuple):",
        '    """All record kinds of one library version."""',
        "",
        "    release: str  # of CUDA",
        "    records: dict[str, RecordLayout]",
        "",
        "",
        "# Width in bytes of each field.",
        "WIDTHS: dict[str, dict[str, int]] = {",
        *(f'    "{record.name}": {packed(record.fields)},' for record in RECORDS),
        "}",
        "",
    ]
    for version in sorted(tables):
        for kind, layout in tables[version].items():
            if (kind, layout) not in names:
                same = [
                    name for (other, known), name in names.items() if (other, known.offsets) == (kind, layout.offsets)
                ]
                name = f"_{kind}_{sum(1 for known, _ in names if known == kind) + 1}"
                out.append(f"# {layout.struct}, first in CUDA {releases[version].split(',')[0]}")
                offsets = f"{same[0]}.offsets" if same else packed(dict(layout.offsets))
                out.append(f"{name} = RecordLayout({layout.size}, {offsets})")
                names[kind, layout] = name
    sets, set_of = record_sets(
        {version: {kind: names[kind, layout] for kind, layout in tables[version].items()} for version in sorted(tables)}
    )
    out += sets
    rows = [f'    {version}: VersionLayout("{releases[version]}", {set_of[version]}),' for version in sorted(tables)]
    out += ["", "# By the number that cuptiGetVersion gives.", "LAYOUTS: dict[int, VersionLayout] = {", *rows, "}", ""]
    return "\n".join(out)


def render_versions(tables: dict[int, dict[str, Layout]], releases: dict[int, str]) -> str:
    """The agent's module. Runs on Python 3.9, standard library only."""
    offsets = {version: dict(records["KERNEL"].offsets)["name"] for version, records in tables.items()}
    out = [
        '"""CUPTI versions whose record layouts are known. Generated by daemon/native/generate_cupti_layouts.py."""',
        "",
        "# Number that cuptiGetVersion gives -> CUDA release.",
        "RELEASES = {",
        *(f'    {version}: "{releases[version]}",' for version in sorted(releases)),
        "}",
        "KNOWN = frozenset(RELEASES)",
        "",
        "# Byte offset of the name pointer in a kernel record.",
        "KERNEL_NAME_OFFSETS = {",
        *(f"    {version}: {offsets[version]}," for version in sorted(offsets)),
        "}",
        "",
    ]
    return "\n".join(out)


def main() -> None:
    """Downloads, measures and writes both modules, formatted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=Path, help="folder for the downloads (default: a temporary one)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        tables, releases = collect(folder)
    LAYOUTS_FILE.write_text(render_layouts(tables, releases))
    VERSIONS_FILE.write_text(render_versions(tables, releases))
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", LAYOUTS_FILE, VERSIONS_FILE], check=True)


if __name__ == "__main__":
    main()
