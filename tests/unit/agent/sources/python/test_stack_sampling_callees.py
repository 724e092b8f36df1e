"""What is recorded for callees: the bytecode and names of the code that ran, and the meaning of the opcodes."""

import dis
import io
import sys
import tokenize
import zlib
from types import FunctionType, SimpleNamespace
from typing import Any, Dict, List, Tuple

import pytest
from kineto_agent.protocol.records import PYTHON_BYTECODE, SPACE_PYTHON_BYTECODE, SPACE_PYTHON_CODE
from kineto_agent.sources.python.stack_sampling import opcode_table
from support.agent.agent_daemon import code_of
from support.agent.stack_recorder import Recorder

with_callees = pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no columns")
TEXT = bytes(1 << 20)


def compress(recorder: Recorder, ticks: int = 12) -> int:
    """Compress until so many samples are taken meanwhile."""
    size, ticks = 0, ticks + recorder.session.ticks()
    while recorder.session.ticks() < ticks:
        size += len(zlib.compress(TEXT))
    return size


def call_of_compress(recorder: Recorder) -> int:
    """Is never the innermost function of a sample."""
    return compress(recorder)


def recorded() -> Tuple[Dict[str, Any], Dict[str, List[bytes]]]:
    """The metadata of a recording, and the bytecode, the names and the variables of the functions of this module."""
    recorder = Recorder()
    try:
        call_of_compress(recorder)
        recorder.stop()
        strings = recorder.reader.strings()
    finally:
        recorder.close()
    found = {}
    for (space, number), entry in strings.items():
        code = code_of(strings[(SPACE_PYTHON_CODE, number)]) if space == SPACE_PYTHON_BYTECODE else None
        if code is not None and code.file == __file__:
            size, names = PYTHON_BYTECODE.unpack_from(entry)
            parts = entry[PYTHON_BYTECODE.size :]
            found[code.name] = [parts[:size], parts[size : size + names], parts[size + names :]]
    return recorder.session.metadata, found


@with_callees
def test_the_code_that_ran_has_its_bytecode_and_names() -> None:
    _, found = recorded()
    code = compress.__code__
    bytecode, names, variables = found["compress"]
    assert len(bytecode) == len(code.co_code)
    assert names == b"".join(name.encode() + b"\0" for name in code.co_names)
    assert variables == b"recorder\0ticks\0size\0"
    assert "call_of_compress" not in found


@with_callees
def test_the_opcodes_tell_what_specialised_instructions_are() -> None:
    table = recorded()[0]["opcodes"]
    base = {opcode: name for name, (_, *numbers) in table.items() for opcode in numbers}
    specialised = 0
    for _ in range(20):
        list(tokenize.tokenize(io.BytesIO(b"a = b + 1\n" * 100).readline))
    for code in (function.__code__ for function in vars(tokenize).values() if isinstance(function, FunctionType)):
        live = code._co_code_adaptive  # type: ignore[attr-defined]
        told = {each.offset: base[live[each.offset]] for each in dis.get_instructions(code)}
        assert told == {each.offset: each.opname for each in dis.get_instructions(code)}
        specialised += live != code.co_code
    assert specialised


@with_callees
def test_caches_follow_their_instructions() -> None:
    table = opcode_table()
    assert table is not None
    instructions = list(dis.get_instructions(compress))
    lengths = [after.offset - before.offset for before, after in zip(instructions, instructions[1:])]
    assert lengths == [2 * (1 + table[each.opname][0]) for each in instructions[:-1]]


@with_callees
def test_instructions_that_tools_and_compilers_put_in_place_and_pseudo_instructions_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_3_14 = {"ADD": 44, "ADD_INT": 129, "INSTRUMENTED_CALL": 240, "ENTER_EXECUTOR": 255, "JUMP": 256}
    known = {"_inline_cache_entries": {"ADD": 5}, "_all_opmap": of_3_14, "deoptmap": {"ADD_INT": "ADD"}, "opname": []}
    monkeypatch.setitem(sys.modules, "dis", SimpleNamespace(**known))
    assert opcode_table() == {"ADD": [5, 44, 129]}


@pytest.mark.skipif(sys.version_info >= (3, 11), reason="code objects have columns")
def test_without_columns_in_code_objects_no_bytecode_is_recorded() -> None:
    metadata, found = recorded()
    assert "opcodes" not in metadata
    assert not found


def test_nothing_is_imported_to_know_the_opcodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dis")
    assert opcode_table() is None
    assert "dis" not in sys.modules


@pytest.mark.parametrize("of_another_release", [{}, {"_inline_cache_entries": 3}, {"_inline_cache_entries": {}}])
def test_a_module_of_another_form_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, of_another_release: Dict[str, Any]
) -> None:
    other = type(sys)("dis")
    other.__dict__.update(of_another_release)
    monkeypatch.setitem(sys.modules, "dis", other)
    assert opcode_table() is None
