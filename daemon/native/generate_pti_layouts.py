"""Developer tool: writes the tables of PTI's record layouts from the vendor's public headers.

    python daemon/native/generate_pti_layouts.py CLONE

CLONE is a clone of Intel's repository pti-gpu with its tags: the wheels of `intel-pti` carry no headers.

Theory of operation
    A record of PTI carries its kind, but neither its size nor its layout: both depend on the version of the library
    (ptiVersionString). A version writes the newest structure of its `pti_view.h` for each kind. For each tag this tool
    compiles a small C program that prints offsetof, sizeof of the fields that we read, and writes

    daemon/kineto_trace/decode/pti_layouts.py       everything, for the decoder
    agent/kineto_agent/sources/pti/known_versions.py    what the agent needs: versions

    Versions without a public header (SAME_AS) have been found to write the records of the version before; the
    integration tests with the real libraries say so again each time (tests/integration/sources/xpu).

    Only numbers and field names are kept.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from generate_cupti_layouts import packed, record_sets

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS_FILE = ROOT / "daemon/kineto_trace/decode/pti_layouts.py"
VERSIONS_FILE = ROOT / "agent/kineto_agent/sources/pti/known_versions.py"

# Version without its patch number -> tag.
TAGS = {
    "0.12": "pti-0.12.4",
    "0.13": "pti-0.13.1",
    "0.14": "pti-0.14.0",
    "0.15": "pti-0.15.0",
    "0.16": "pti-0.16.0",
    "0.17": "pti-0.17.0",
    "1.0": "pti-1.0.0-rc2",
}
SAME_AS = {"1.1": "1.0", "1.2": "1.0"}
HEADERS = "sdk/include/pti/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One kind of record: its name here, the C structure without a number, and the width in bytes of each field."""

    name: str
    kind: str
    struct: str
    fields: dict[str, int]


_TIMES = {"_start_timestamp": 8, "_end_timestamp": 8}
_QUEUED = {"_append_timestamp": 8, "_submit_timestamp": 8}
_IDS = {"_correlation_id": 4, "_thread_id": 4}
_QUEUE = {"_queue_handle": 8, "_context_handle": 8, "_sycl_queue_id": 8}
_DEVICE = {"_device_uuid": 16}
_COPY = {"_memcpy_type": 4, "_mem_src": 4, "_mem_dst": 4, "_bytes": 8}
RECORDS = (
    Record(
        name="KERNEL",
        kind="PTI_VIEW_DEVICE_GPU_KERNEL",
        struct="kernel",
        fields={"_name": 8} | _TIMES | _QUEUED | _IDS | _QUEUE | _DEVICE,
    ),
    Record(
        name="DRIVER_API",
        kind="PTI_VIEW_DRIVER_API",
        struct="api",
        fields=_TIMES | _IDS | {"_api_group": 4, "_api_id": 4},
    ),
    Record(
        name="OVERHEAD",
        kind="PTI_VIEW_COLLECTION_OVERHEAD",
        struct="overhead",
        fields={"_overhead_start_timestamp_ns": 8, "_overhead_end_timestamp_ns": 8, "_overhead_kind": 4},
    ),
    Record(
        name="RUNTIME_API",
        kind="PTI_VIEW_RUNTIME_API",
        struct="api",
        fields=_TIMES | _IDS | {"_api_group": 4, "_api_id": 4},
    ),
    Record(
        name="EXTERNAL_CORRELATION",
        kind="PTI_VIEW_EXTERNAL_CORRELATION",
        struct="external_correlation",
        fields={"_correlation_id": 4, "_external_id": 8, "_external_kind": 4},
    ),
    Record(
        name="MEMORY_COPY",
        kind="PTI_VIEW_DEVICE_GPU_MEM_COPY",
        struct="memory_copy",
        fields=_TIMES | _QUEUED | _IDS | _QUEUE | _DEVICE | _COPY,
    ),
    Record(
        name="MEMORY_FILL",
        kind="PTI_VIEW_DEVICE_GPU_MEM_FILL",
        struct="memory_fill",
        fields=_TIMES | _QUEUED | _IDS | _QUEUE | _DEVICE | {"_mem_type": 4, "_bytes": 8, "_value_for_set": 8},
    ),
    Record(
        name="MEMORY_COPY_P2P",
        kind="PTI_VIEW_DEVICE_GPU_MEM_COPY_P2P",
        struct="memory_copy_p2p",
        fields=_TIMES | _QUEUED | _IDS | _QUEUE | _COPY | {"_src_uuid": 16, "_dst_uuid": 16},
    ),
    Record(
        name="SYNCHRONIZATION",
        kind="PTI_VIEW_DEVICE_SYNCHRONIZATION",
        struct="synchronization",
        fields=_TIMES
        | _IDS
        | {
            "_synch_type": 4,
            "_context_handle": 8,
            "_queue_handle": 8,
            "_event_handle": 8,
            "_api_id": 4,
            "_api_group": 4,
        },
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What one record kind looks like in one version."""

    kind: int
    struct: str
    size: int
    offsets: tuple[tuple[str, int], ...]


def newest(header: str, name: str) -> str:
    """The structure with the highest number: the one that the library of this header writes; "": it has none."""
    numbers = re.findall(rf"^\}} pti_view_record_{name}(?:_v(\d+))?;", header, re.MULTILINE)
    if not numbers:
        return ""
    highest = max(int(text or 1) for text in numbers)
    return f"pti_view_record_{name}" + (f"_v{highest}" if highest > 1 else "")


def program(header: str) -> str:
    """A C program that prints one JSON object: the layout of every record kind that the header has."""
    lines = ["#include <stddef.h>", "#include <stdio.h>", "#include <pti/pti_view.h>"]
    lines.append('int main(void) { const char *between = ""; printf("{");')
    for record in RECORDS:
        struct = newest(header, record.struct)
        if not struct or not re.search(rf"\b{record.kind}\b", header):
            continue
        head = f'\\"{record.name}\\": {{\\"kind\\": %d, \\"struct\\": \\"{struct}\\", \\"size\\": %zu'
        lines.append(f'printf("%s{head}", between, (int){record.kind}, sizeof({struct})); between = ", ";')
        for field, width in record.fields.items():
            lines.append(f'_Static_assert(sizeof((({struct} *)0)->{field}) == {width}, "{struct}.{field}");')
            lines.append(f'printf(", \\"{field}\\": %zu", offsetof({struct}, {field}));')
        lines.append('printf("}");')
    lines.append('printf("}"); return 0; }')
    return "\n".join(lines)


def measure(clone: Path, tag: str, scratch: Path) -> dict[str, Layout]:
    """Compiles and runs the program against the headers of one tag."""
    include = scratch / tag / "pti"
    include.mkdir(parents=True)
    git = ["git", "-C", str(clone)]
    listed = subprocess.run([*git, "ls-tree", "--name-only", tag, HEADERS], check=True, capture_output=True, text=True)
    for path in listed.stdout.split():
        text = subprocess.run([*git, "show", f"{tag}:{path}"], check=True, capture_output=True).stdout
        (include / Path(path).name).write_bytes(text)
    made_by_their_build = {"pti_export.h": "#define PTI_EXPORT\n#define PTI_NO_EXPORT\n", "pti_version.h": ""}
    for name, content in made_by_their_build.items():
        (include / name).write_text(content)
    source, binary = scratch / "layout.c", scratch / "layout"
    source.write_text(program((include / "pti_view.h").read_text()))
    subprocess.run(["cc", "-w", "-I", include.parent, source, "-o", binary], check=True)
    result = json.loads(subprocess.run([binary], check=True, capture_output=True).stdout)
    return {
        name: Layout(
            kind=values.pop("kind"), struct=values.pop("struct"), size=values.pop("size"), offsets=tuple(values.items())
        )
        for name, values in result.items()
    }


def collect(clone: Path) -> dict[str, dict[str, Layout]]:
    """The layouts of all versions."""
    with tempfile.TemporaryDirectory() as scratch:
        tables = {version: measure(clone, tag, Path(scratch)) for version, tag in TAGS.items()}
    return tables | {version: tables[same] for version, same in SAME_AS.items()}


def render_layouts(tables: dict[str, dict[str, Layout]]) -> str:
    """The decoder's module."""
    names: dict[tuple[str, Layout], str] = {}
    out = [
        '"""Layouts of PTI\'s records by library version.',
        "",
        "Generated by daemon/native/generate_pti_layouts.py.",
        "Each record layout is the kind, the size in bytes and the byte offset of each field, under the vendor's field",
        "name. Identical layouts are shared by versions. The widths of the fields are the same in all versions.",
        '"""',
        "",
        "from typing import NamedTuple",
        "",
        "",
        "class PtiLayout(NamedTuple):",
        '    """One kind of record: its number, bytes of a record and byte offsets of the fields that we read."""',
        "",
        "    kind: int",
        "    size: int",
        "    offsets: dict[str, int]",
        "",
        "",
        "# Width in bytes of each field.",
        "WIDTHS: dict[str, dict[str, int]] = {",
        *(f'    "{record.name}": {packed(record.fields)},' for record in RECORDS),
        "}",
        "",
    ]
    for version, table in tables.items():
        for name, layout in table.items():
            if (name, layout) not in names:
                same = [
                    known for (other, each), known in names.items() if (other, each.offsets) == (name, layout.offsets)
                ]
                variable = f"_{name}_{sum(1 for known, _ in names if known == name) + 1}"
                out.append(f"# {layout.struct}, first in {version}")
                offsets = f"{same[0]}.offsets" if same else packed(dict(layout.offsets))
                out.append(f"{variable} = PtiLayout({layout.kind}, {layout.size}, {offsets})")
                names[name, layout] = variable
    sets, set_of = record_sets(
        {version: {name: names[name, layout] for name, layout in table.items()} for version, table in tables.items()}
    )
    out += sets
    rows = [f'    "{version}": {set_of[version]},' for version in tables]
    out += ["", "# By what ptiVersionString says, without the patch number."]
    out += ["LAYOUTS: dict[str, dict[str, PtiLayout]] = {", *rows, "}", ""]
    return "\n".join(out)


def render_versions(tables: dict[str, dict[str, Layout]]) -> str:
    """The agent's module. Runs on Python 3.9, standard library only."""
    out = [
        '"""PTI versions whose record layouts are known. Generated by daemon/native/generate_pti_layouts.py."""',
        "",
        "# What ptiVersionString says, without the patch number.",
        "KNOWN = (",
        *(f'    "{version}",' for version in tables),
        ")",
        "",
    ]
    return "\n".join(out)


def main() -> None:
    """Measures and writes both modules, formatted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="a clone of Intel's pti-gpu, with tags")
    tables = collect(parser.parse_args().clone)
    LAYOUTS_FILE.write_text(render_layouts(tables))
    VERSIONS_FILE.write_text(render_versions(tables))
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", LAYOUTS_FILE, VERSIONS_FILE], check=True)


if __name__ == "__main__":
    main()
