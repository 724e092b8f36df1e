"""Handmade device code: cubins, fatbins and the ELF files that hold them, laid out as nvcc and nvlink do."""

from __future__ import annotations  # the agent's tests run under 3.9

import struct

LAUNCH = "cudaGraphLaunch"


def elf(machine: int, sections: list[tuple[str, int, bytes, int]]) -> bytes:
    """A 64-bit ELF file. sections: name, type, content, link (the first one here is number 1)."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name, *_ in sections) + b".shstrtab\0"
    body, rows = b"", [bytes(64)]
    for name, kind, content, link in [*sections, (".shstrtab", 3, names, 0)]:
        offset = names.index(b"\0" + name.encode() + b"\0") + 1
        rows.append(struct.pack("<IIQQQQIIQQ", offset, kind, 0, 0, 64 + len(body), len(content), link, 0, 1, 0))
        body += content + bytes(-len(content) % 8)
    head = struct.pack("<4sBBB9xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 2, machine, 1, 0, 0, 64 + len(body), 0, 64, 0, 0,
                       64, len(rows), len(rows) - 1)  # fmt: skip
    return head + body + b"".join(rows)


def cubin(symbols: dict[str, int], machine: int = 190) -> bytes:
    """symbols: name -> the section where it is defined; 0: nowhere, it is imported."""
    names, table = b"\0", bytes(24)
    for name, section in symbols.items():
        table += struct.pack("<IBBHQQ", len(names), 0x12, 0, section, 0, 0)
        names += name.encode() + b"\0"
    return elf(machine, [(".strtab", 3, names, 0), (".symtab", 2, table, 1)])


def fatbin(*payloads: bytes, kind: int = 2) -> bytes:
    """A container with one entry for each."""
    entries = b"".join(
        struct.pack("<HHIQ", kind, 0x0101, 64, len(payload) + -len(payload) % 8)
        + bytes(48)
        + payload
        + bytes(-len(payload) % 8)
        for payload in payloads
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def program(section: bytes, name: str = ".nv_fatbin") -> bytes:
    """A program for x86-64 that holds it, and calls cudaGraphLaunch from the host."""
    symbols = struct.pack("<IBBHQQ", 1, 0x12, 0, 0, 0, 0)
    return elf(
        62, [(".strtab", 3, b"\0cudaGraphLaunch\0", 0), (".symtab", 2, symbols, 1), (".text", 1, bytes(40), 0),
             (name, 1, section, 0)]
    )  # fmt: skip


LAUNCHING = cubin({"kernel": 1, LAUNCH: 0})
