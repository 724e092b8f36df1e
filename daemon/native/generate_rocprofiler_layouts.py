"""Developer tool: compares our tables of rocprofiler-sdk's records with the vendor's public headers, and writes HIP's.

    python daemon/native/generate_rocprofiler_layouts.py VERSION=INCLUDE... [--hsakmt INCLUDE] [--write]

Theory of operation
    INCLUDE is the folder that has rocprofiler-sdk/fwd.h of that version (in the repository
    projects/rocprofiler-sdk/source/include), and --hsakmt the one with hsakmt/hsakmttypes.h. A C program made of the
    headers' own structures prints sizes and offsets, which must be those of

    daemon/kineto_trace/decode/rocprofiler_layouts.py     records and callbacks

    and, with --write, the places of HIP's arguments of interest are computed and written to

    agent/native/rocprofiler/hip_arguments.h                          where a call's structure has stream and kernel

    The headers include HIP's and HSA's, which are not needed: the structures in question are taken out of the text.
    Only numbers and names of fields are kept.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from kineto_trace.decode.rocprofiler_layouts import CALLBACKS, RECORDS, releases_of

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS_FILE = ROOT / "agent/native/rocprofiler/hip_arguments.h"
NAMED_BY = {"hipFunction_t": "HIP_BY_FUNCTION", "const void*": "HIP_BY_HOST_FUNCTION"}
# Names of the parameter that says which kernel, by type: another `const void*` of such a call is none.
FUNCTION_PARAMETERS = frozenset(("func", "f", "fPtr", "function_address"))
LAUNCH = re.compile(r"hip\w*Launch\w*")
# Types of HIP's parameters that are neither pointers nor handles, with their sizes in bytes.
VALUES = {"hipMemcpyKind": 4, "hipPitchedPtr": 32, "hipExtent": 24, "hipStreamCaptureMode": 4}
_STRUCT = re.compile(r"typedef struct (\w+)\s*\{(.*?)\}\s*\1;", re.DOTALL)
_MEMBER = re.compile(r"struct\s*\{([^{}]*)\}\s*(\w+);")


def structures(text: str) -> dict[str, str]:
    """The text of each `typedef struct NAME {...} NAME;` of a header."""
    return {match[1]: match[0] for match in _STRUCT.finditer(re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL))}


def measuring_program(include: Path) -> str:
    """A C program that prints {structure: {"sizeof": bytes, field: offset, …}} of all structures of the tables."""
    folder = include / "rocprofiler-sdk"
    known = structures((folder / "buffer_tracing.h").read_text()) | structures(
        (folder / "callback_tracing.h").read_text()
    )
    lines = ["#include <stddef.h>", "#include <stdio.h>", "#include <rocprofiler-sdk/agent.h>"]
    wanted = {layout.structure: dict(layout.offsets) for layout in (*RECORDS.values(), *CALLBACKS.values())}
    for name in wanted:
        if name in known:
            lines.append(known[name].replace("rocprofiler_scratch_alloc_flag_t", "int"))  # of a header of HSA's
    lines.append('int main(void) { printf("{");')
    for number, (name, offsets) in enumerate(wanted.items()):
        lines.append(f'printf("{"," if number else ""}\\"{name}\\": {{\\"sizeof\\": %zu", sizeof({name}));')
        lines.extend(f'printf(", \\"{field}\\": %zu", offsetof({name}, {field}));' for field in offsets)
        lines.append('printf("}");')
    return "\n".join([*lines, 'printf("}"); return 0; }'])


def run_program(source: str, includes: list[Path]) -> dict[str, dict[str, int]]:
    """Compiles and runs a program and reads what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        path, binary = Path(folder, "layout.c"), Path(folder, "layout")
        path.write_text(source)
        flags = [argument for include in includes for argument in ("-I", str(include))]
        subprocess.run(["cc", "-w", *flags, path, "-o", binary], check=True)
        printed = subprocess.run([binary], check=True, capture_output=True).stdout
    result: dict[str, dict[str, int]] = json.loads(printed)
    return result


def differences(version: str, measured: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """Where the tables are not what one version's headers say."""
    for layout in (*RECORDS.values(), *CALLBACKS.values()):
        found = dict(measured[layout.structure])
        size = found.pop("sizeof")
        if size not in layout.sizes:
            yield f"{version}: {layout.structure} has {size} bytes, the table says {layout.sizes}"
        if found != dict(layout.offsets):
            yield f"{version}: {layout.structure} has {found}, the table says {dict(layout.offsets)}"


# ------------------------------------------------------------ arguments of HIP's calls


def members(text: str) -> dict[str, list[tuple[str, str]]]:
    """The parameters of each call: (type, name), from the union of all arguments."""
    plain = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    return {
        match[2]: [
            (" ".join(line.split()[:-1]).replace(" *", "*"), line.split()[-1])
            for line in match[1].split(";")
            if line.strip() and "[" not in line
        ]
        for match in _MEMBER.finditer(plain)
    }


def argument_offsets(parameters: list[tuple[str, str]]) -> dict[str, int]:
    """The byte offset of each parameter, by the sizes and alignments of 64-bit Linux."""
    offsets: dict[str, int] = {}
    at = 0
    for kind, name in parameters:
        if kind == "rocprofiler_dim3_t":
            size, alignment = 12, 4
        elif kind in VALUES:
            size, alignment = VALUES[kind], min(VALUES[kind], 8)
        elif kind in ("int", "unsigned int", "uint32_t", "float"):
            size = alignment = 4
        elif kind in ("unsigned short", "short"):
            size = alignment = 2
        elif kind in ("unsigned char", "char"):
            size = alignment = 1
        else:
            size = alignment = 8  # pointers, handles, size_t
        at = -(-at // alignment) * alignment
        offsets[name] = at
        at += size
    return offsets


def argument_rows(calls: Mapping[str, list[tuple[str, str]]]) -> Iterator[str]:
    """The lines of the table, one for each call that has a stream or launches a kernel."""
    for call in sorted(calls):
        parameters = calls[call]
        offsets = argument_offsets(parameters)
        stream = next((offsets[name] for kind, name in parameters if kind == "hipStream_t"), -1)
        function, named_by = -1, "HIP_UNNAMED"
        if LAUNCH.fullmatch(call):
            for kind, name in parameters:
                if kind in NAMED_BY and name in FUNCTION_PARAMETERS:
                    function, named_by = offsets[name], NAMED_BY[kind]
        if stream >= 0 or function >= 0:
            yield f'    {{"{call}", {stream}, {function}, {named_by}}},'


def render_arguments(text: str) -> str:
    """The whole of hip_arguments.h."""
    return "\n".join(
        [
            "/* Where HIP's calls have their stream and their kernel, in the structure of their arguments.",
            " *",
            " * Generated by daemon/native/generate_rocprofiler_layouts.py. A call has its parameters for ever:",
            " * functions that get other ones get new names.",
            " */",
            "#ifndef KINETO_HIP_ARGUMENTS_H",
            "#define KINETO_HIP_ARGUMENTS_H",
            "",
            "#include <stdint.h>",
            "",
            "enum hip_named_by {",
            "    HIP_UNNAMED,",
            "    HIP_BY_FUNCTION,      /* hipKernelNameRef */",
            "    HIP_BY_HOST_FUNCTION, /* hipKernelNameRefByPtr */",
            "};",
            "",
            "static const struct {",
            "    const char *name;",
            "    int16_t stream; /* byte offset; -1: none */",
            "    int16_t function;",
            "    uint8_t named_by;",
            "} HIP_ARGUMENTS[] = {",
            *argument_rows(members(text)),
            "};",
            "",
            "#endif",
            "",
        ]
    )


def main() -> None:
    """Compares all versions that are given; exits with 1 at a difference."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", metavar="VERSION=INCLUDE")
    parser.add_argument("--hsakmt", type=Path, help="folder with hsakmt/hsakmttypes.h")
    parser.add_argument("--write", action="store_true", help="write hip_arguments.h from the last version given")
    arguments = parser.parse_args()
    problems: list[str] = []
    for version, _, folder in (text.partition("=") for text in arguments.versions):
        include = Path(folder)
        releases_of(version)
        includes = [include, *([arguments.hsakmt] if arguments.hsakmt else [])]
        problems += differences(version, run_program(measuring_program(include), includes))
        if arguments.write:
            text = (include / "rocprofiler-sdk/hip/api_args.h").read_text()
            ARGUMENTS_FILE.write_text(render_arguments(text))
    for problem in problems:
        sys.stderr.write(problem + "\n")
    if problems:
        sys.exit(1)
    sys.stdout.write(f"{len(arguments.versions)} versions agree with the tables\n")


if __name__ == "__main__":
    main()
