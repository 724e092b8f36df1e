"""Prints code objects of this Python's standard library, and which names push what their calls call.

    pushed_callables.py PATTERN…

Which instruction pushed the callable follows from the depths of the stack along the bytecode, which is slow, but owes
nothing to positions in the source. Patterns are of files in the folder of the standard library. CPython 3.11 and later.
"""

import dis
import json
import os
import platform
import sys
from pathlib import Path
from types import CodeType
from typing import Any, Dict, Iterator, List, Optional

from kineto_agent.sources.python.stack_sampling import opcode_table

CALLS = ("PRECALL", "CALL", "CALL_KW", "CALL_FUNCTION_EX")
ENDS = ("RETURN_", "RERAISE", "RAISE_", "JUMP_FORWARD", "JUMP_BACKWARD", "INTERPRETER_EXIT")
NO_PUSH = (
    *("POP_", "STORE_", "DELETE_", "JUMP_", "LIST_", "DICT_", "SET_ADD", "SET_UPDATE", "MAP_ADD", "RERAISE", "RETURN_"),
    *("COPY", "PUSH_NULL", "KW_NAMES", "NOP", "NOT_TAKEN", "RESUME", "EXTENDED_ARG", "PRECALL", "CACHE", "END_FOR"),
    "CHECK_EXC_MATCH",
)
BEFORE_312 = sys.version_info < (3, 12)


def codes(code: CodeType) -> Iterator[CodeType]:
    """The code object and those inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def effect(instruction: dis.Instruction, jump: bool = False) -> int:
    """By how much the stack grows."""
    argument = None if instruction.opcode < dis.HAVE_ARGUMENT else instruction.arg
    return dis.stack_effect(instruction.opcode, argument, jump=jump)


def depths(code: CodeType, instructions: List[dis.Instruction]) -> List[Optional[int]]:
    """The depth of the stack before each instruction; None if none leads there."""
    place = {instruction.offset: number for number, instruction in enumerate(instructions)}
    found: List[Optional[int]] = [None] * len(instructions)
    handlers = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    begins = [(0, 0), *((place[each.target], each.depth + 1 + bool(each.lasti)) for each in handlers)]
    while begins:
        at, depth = begins.pop()
        while at < len(instructions) and found[at] is None:
            found[at], instruction = depth, instructions[at]
            if instruction.opcode in (*dis.hasjrel, *dis.hasjabs):
                begins.append((place[instruction.argval], depth + effect(instruction, jump=True)))
            if instruction.opname.startswith(ENDS):
                break
            at, depth = at + 1, depth + effect(instruction)
    return found


def pushed(instructions: List[dis.Instruction], before: List[Optional[int]], call: int) -> Iterator[str]:
    """The names that the instructions load which pushed the two places of the callable, or its one."""
    instruction, depth = instructions[call], before[call] or 0
    arguments = instruction.arg or 0
    if instruction.opname == "CALL_FUNCTION_EX":
        with_keywords = arguments & 1 if sys.version_info < (3, 14) else 1
        slots = [depth - 1 - with_keywords - (1 if sys.version_info < (3, 13) else 2)]
    elif instruction.opname == "CALL" and BEFORE_312:
        slots = [depth - 2, depth - 1]  # PRECALL has taken the arguments, as far as stack_effect() says
    else:
        first = depth - arguments - 2 - (instruction.opname == "CALL_KW")
        slots = [first, first + 1]
    for slot in slots:
        for at in range(call - 1, -1, -1):
            depth_at, other = before[at], instructions[at]
            if depth_at is None or other.opname.startswith(NO_PUSH):
                continue
            after = depth_at + effect(other)
            if after > slot >= depth_at or (after == slot + 1 and depth_at > slot):
                if other.opname.startswith("LOAD_") and other.opname != "LOAD_CONST":
                    yield str(other.argval)
                break


def described(code: CodeType) -> List[Any]:
    """Bytecode, table of locations, first line, names, variables, and for the offset of each call what is pushed."""
    instructions = list(dis.get_instructions(code))
    before = depths(code, instructions)
    calls: Dict[int, List[str]] = {
        instruction.offset: list(pushed(instructions, before, at))
        for at, instruction in enumerate(instructions)
        if instruction.opname in CALLS and before[at] is not None
    }
    cells = [name for name in code.co_cellvars if name not in code.co_varnames]
    variables = [*code.co_varnames, *cells, *code.co_freevars]
    live = code._co_code_adaptive  # type: ignore[attr-defined]
    return [live.hex(), code.co_linetable.hex(), code.co_firstlineno, list(code.co_names), variables, calls]


def main() -> None:
    """Prints {version, opcodes, codes}."""
    folder = Path(os.__file__).parent
    files = [file for pattern in sys.argv[1:] for file in sorted(folder.glob(pattern))]
    found = [
        described(code)
        for file in files
        for code in codes(compile(file.read_bytes(), str(file), "exec", dont_inherit=True))
    ]
    print(json.dumps({"version": platform.python_version(), "opcodes": opcode_table(), "codes": found}))


main()
