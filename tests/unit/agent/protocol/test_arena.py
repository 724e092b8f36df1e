"""agent/native/common/arena.h says the same as kineto_agent/protocol/arena.py and records.py."""

import re

from kineto_agent.protocol import arena, records
from support.machine.native import COLLECTOR

HEADER = (COLLECTOR / "common" / "arena.h").read_text()


def test_every_number_of_the_c_header_is_that_of_the_python_modules() -> None:
    numbers = {name: int(value) for name, value in re.findall(r"#define ARENA_(\w+) (\d+)$", HEADER, re.MULTILINE)}
    python = {**vars(records), **vars(arena)}
    assert numbers == {name: python[name] for name in numbers}


def test_the_c_header_has_every_offset_and_state() -> None:
    needed = {
        "STRINGS_USED", "RECORDS", "DROPPED", "VALID_BYTES", "SEQUENCE", "CLOSED", "RECORD_BYTES",
        "RECORD_KINDS", "CLOCKS_FIRST", "CLOCKS_LAST", "STATE", "BUFFER_VALID_BYTES", "BUFFER_SEQUENCE",
        "BUFFER_RECORDS", "FREE", "LOANED", "COMPLETED", "READY", "HEADER_BYTES", "DESCRIPTOR_BYTES",
        "PAGE_BYTES", "SPACE_KERNEL_NAME", "SPACE_DRIVER_API", "SPACE_RUNTIME_API", "SPACE_PYTHON_CODE",
        "SPACE_STACK_NODE", "SPACE_THREAD_NAME", "SPACE_OP_NAME",
        "SPACE_OP_INPUTS", "SPACE_TORCH_THREAD", "SPACE_OP_COMMS", "KIND_OP", "KIND_OP_TENSORS", "KIND_OP_COMMS",
        "SPACE_PYTHON_BYTECODE", "SPACE_CLOCK_PAIR", "SPACE_PYTHON_CALL", "PYTHON_CALL_BYTES", "CALL_RETURN",
        "CALL_C_RETURN", "CALL_CUT", "CALL_UNKNOWN", "CALL_FIRST", "SCOPE_FUNCTION", "SCOPE_BACKWARD_FUNCTION",
        "SCOPE_USER", "OP_UNFINISHED", "OP_ENDED_ELSEWHERE",
    }  # fmt: skip
    assert needed == set(re.findall(r"#define ARENA_(\w+) \d+$", HEADER, re.MULTILINE))


def test_the_magic_is_the_same() -> None:
    assert re.findall(r'#define ARENA_MAGIC "(\w+)"', HEADER) == [arena.MAGIC.decode()]


def test_the_constant_header_has_the_same_fields_in_the_same_order() -> None:
    fields = re.findall(r"(\w+)(?:\[8\])?;", HEADER.split("struct arena_fixed {")[1].split("}")[0])
    assert tuple(fields) == arena.FIXED_FIELDS
    assert arena.FIXED.size == 64


def test_a_string_entry_has_the_same_fields() -> None:
    types = re.findall(r"(uint\d+_t) \w+;", HEADER.split("struct arena_string {")[1].split("}")[0])
    assert types == ["uint64_t", "uint32_t", "uint32_t"]
    assert arena.STRING_ENTRY.size == 16
