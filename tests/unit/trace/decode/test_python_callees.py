import ast
import dis
import functools
import json
import os
import platform
import random
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kineto_agent.sources.python.stack_sampling import opcode_table
from kineto_trace.decode.python_callees import Bytecode, Opcodes, opcodes
from support.machine.pythons import python

PROGRAM = Path(__file__).parents[3] / "support" / "agent" / "pushed_callables.py"
AGENT = Path(__file__).parents[4] / "agent"
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION_EX")


@functools.cache
def known() -> Opcodes:
    found = opcodes(platform.python_version(), opcode_table())
    assert found is not None
    return found


def variables(code: CodeType) -> list[str]:
    cells = [name for name in code.co_cellvars if name not in code.co_varnames]
    return [*code.co_varnames, *cells, *code.co_freevars]


def bytecode_of(code: CodeType) -> Bytecode:
    live = code._co_code_adaptive  # type: ignore[attr-defined]
    return Bytecode(
        known(), live, code.co_linetable, code.co_firstlineno, names=code.co_names, variables=variables(code)
    )


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def callees(source: str) -> list[str]:
    """What is called, in the order of the bytecode, functions inside last; "" where that is not known."""
    found = []
    for code in codes(compile(textwrap.dedent(source), "test", "exec")):
        bytecode = bytecode_of(code)
        found += [bytecode.callee(each.offset) for each in dis.get_instructions(code) if each.opname in CALLS]
    return found


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("pickle.dumps(state, protocol=0)", ["pickle.dumps"]),
        ("len(base64.b64encode(pickle.dumps(state)))", ["pickle.dumps", "base64.b64encode", "len"]),
        ("f(*args, **options)", ["f"]),
        ("a.f(1, *args, **options)", ["a.f"]),
        ("a.b.c.d(x)", ["a.b.c.d"]),
        ("a.b().c().d(e.f())", ["a.b", ".c", "e.f", ".d"]),
        ("','.join(map(str, numbers))", ["map", ".join"]),
        ("functions[0](1)", [""]),
        ("f(1)(2)", ["f", ""]),
        ("(f)(1)", [""]),
        ("(a or b).c(1)", [".c"]),
        ("(a if b else c)(1)", [""]),
        ("x = f(1) if g(2) else h(3)", ["g", "f", "h"]),
        ("[f(x) for x in g()]", ["g", "", "f"] if sys.version_info < (3, 12) else ["g", "f"]),
        ("text = f'{f(1)} and {a.g(2):>{h(3)}}'", ["f", "a.g", "h"]),
        ("while f(x):\n    g(x)", ["f", "g", "f"] if sys.version_info < (3, 13) else ["f", "g"]),
        ("await_ = a.sort(key=lambda x: g(x))", ["a.sort", "g"]),
    ],
)
def test_a_call_has_the_name_of_what_it_calls(source: str, named: list[str]) -> None:
    assert callees(source) == named


def test_locals_cells_and_globals_are_named() -> None:
    source = """
        def outer(f, rows):
            g = rows.append
            def inner(x):
                h = f
                return f(x), g(x), h(x), rows.tolist(), K.a(x), sorted(x)
            return f(1), g(2), inner(3)
    """
    assert callees(source) == ["f", "g", "inner", "f", "g", "h", "rows.tolist", "K.a", "sorted"]


def test_calls_over_several_lines_are_named() -> None:
    source = """
        a.b(
            c.d(1),
            key=e(2),
        )
        (x.f()
          .g(3)
          .h())
    """
    assert callees(source) == ["c.d", "e", "a.b", "x.f", ".g", ".h"]


@pytest.mark.parametrize("chain", ["a\n.b(k=1)", "a\n.b\n.c(k=1)", "a.b\n.c(k=1)", "a\n.b()(k=1)", "a\n.b()\n.c(k=1)"])
def test_an_attribute_on_a_line_of_its_own_is_not_what_it_is_an_attribute_of(chain: str) -> None:
    last = f".{chain.rpartition('.')[2].partition('(')[0]}" if ")(" not in chain else ""
    assert callees(f"({chain})")[-1] in ("", last)


def test_a_method_of_super_is_an_attribute_of_what_has_no_name() -> None:
    source = """
        class A(B):
            def f(self):
                return super().f(self.g())
    """
    assert callees(source)[-2:] == ["self.g", ".f"]


@pytest.mark.parametrize(
    "source",
    [
        "with lock:\n    pass",
        "with a.lock:\n    pass",
        "with rows[:3]:\n    pass",
        "@a\ndef f(): pass",
        "@a.b\ndef f(): pass",
    ],
)
def test_a_call_that_the_source_does_not_write_has_no_name(source: str) -> None:
    assert set(callees(source)) == {""}


def test_leaving_a_with_statement_is_not_the_call_that_it_began_with() -> None:
    assert callees("with open(path, mode='r') as file:\n    file.read()") == ["open", "file.read", ""]


def test_a_decorator_that_is_applied_is_not_the_call_that_made_it() -> None:
    assert callees("@a.decorated(1)\ndef f(): pass") == ["a.decorated", ""]


def test_specialised_bytecode_has_the_same_callees() -> None:
    def work(rows: list[int]) -> int:
        total = 0
        for row in rows:
            total += len(str(row)) + rows.count(row) + abs(row)
        return total

    before = [bytecode_of(work.__code__).callee(2 * unit) for unit in range(len(work.__code__.co_code) // 2)]
    for _ in range(100):
        work([1, 2, 3])
    code = work.__code__
    assert code._co_code_adaptive != code.co_code  # type: ignore[attr-defined]
    assert [bytecode_of(code).callee(2 * unit) for unit in range(len(code.co_code) // 2)] == before
    assert [name for name in dict.fromkeys(before) if name] == ["str", "len", "rows.count", "abs"]


def test_long_functions_are_read_past_their_extended_arguments() -> None:
    source = "\n".join(f"name_{number}.call_{number}(other_{number})" for number in range(300))
    assert callees(source) == [f"name_{number}.call_{number}" for number in range(300)]


def test_a_chain_of_many_attributes_is_read_and_too_long_to_be_named() -> None:
    assert callees("a" + ".b" * 600 + "(1)") == [""]
    assert callees("a" + ".b" * 60 + "(1)") == ["a" + ".b" * 60]


def test_only_a_call_has_a_callee() -> None:
    code = compile("a = b.c(d) + e[f]", "test", "exec")
    bytecode = bytecode_of(code)
    named = [each.opname for each in dis.get_instructions(code) if bytecode.callee(each.offset)]
    assert named == [name for name in ("PRECALL", "CALL") if name in dis.opmap]
    assert bytecode.callee(-1) == bytecode.callee(1) == bytecode.callee(10_000) == ""


def test_reading_ends_at_an_unknown_instruction() -> None:
    code = compile("a(1)\nb(2)\nc(3)", "test", "exec")
    first, second, third = (each.offset for each in dis.get_instructions(code) if each.opname in CALLS)
    raw = bytearray(code.co_code)
    raw[second] = 255  # instrumented
    bytecode = Bytecode(known(), bytes(raw), code.co_linetable, 1, names=code.co_names, variables=[])
    assert [bytecode.callee(offset) for offset in (first, second, third)] == ["a", "", ""]


@pytest.mark.parametrize(
    ("version", "table"),
    [
        ("3.10.4", {}),
        ("3.11.7", None),
        (None, {}),
        ("", {}),
        ("3.11.7", []),
        ("three.eleven.", {}),
        ("9" * 5000 + ".1.", {}),
    ],
)
def test_without_columns_or_a_table_of_opcodes_there_are_no_callees(version: object, table: object) -> None:
    assert opcodes(version, table) is None


def test_entries_of_another_form_are_skipped() -> None:
    table = {"CALL": [3, 171], "A": "b", "B": [1, 300], "C": [0, True], "D": [], "E": [1.5, 2], "F": [1]}
    assert opcodes("3.11.7", table) == Opcodes((3, 11), {171: "CALL"}, {171: 3})


@pytest.mark.parametrize("name", ["na\u00efve", "a; 5: 3 running", "<x>", "", "1a", "a.b"])
def test_a_name_that_is_no_plain_identifier_is_left_out(name: str) -> None:
    code = compile("f(1)", "test", "exec")
    (call,) = (each.offset for each in dis.get_instructions(code) if each.opname in CALLS)
    assert Bytecode(known(), code.co_code, code.co_linetable, 1, names=[name], variables=[]).callee(call) == ""


@given(raw=st.binary(max_size=120), spans=st.binary(max_size=120), names=st.lists(st.text(max_size=5), max_size=4))
def test_any_bytes_are_read(raw: bytes, spans: bytes, names: list[str]) -> None:
    bytecode = Bytecode(known(), raw, spans, 1, names=names, variables=names)
    for offset in range(-1, len(raw) + 1):
        assert bytecode.callee(offset) in {"", *(left + right for left in names for right in ("", *names))} or "." in (
            bytecode.callee(offset)
        )


def expected(function: ast.expr) -> str:
    """The name of what is called by the syntax of the source."""
    if isinstance(function, ast.Name):
        return function.id
    return f"{expected(function.value)}.{function.attr}" if isinstance(function, ast.Attribute) else ""


def in_syntax(tree: ast.Module) -> dict[tuple[int, int, int], set[str]]:
    """The names of calls in the source by line and end; a chain over several lines has two lines."""
    found: dict[tuple[int, int, int], set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.end_lineno is not None and node.end_col_offset is not None:
            for line in {node.lineno, node.func.end_lineno or 0}:
                found.setdefault((line, node.end_lineno, node.end_col_offset), set()).add(expected(node.func))
    return found


def compared(file: Path) -> tuple[int, int, list[str]]:
    """How many calls of a module are named and how many are not, and names that its syntax does not have."""
    tree = ast.parse(file.read_bytes())
    syntax, named, nameless, wrong = in_syntax(tree), 0, 0, []
    for code in codes(compile(tree, str(file), "exec", dont_inherit=True)):
        bytecode = bytecode_of(code)
        for unit, (operation, at) in enumerate(zip(code.co_code[::2], code.co_positions(), strict=True)):
            if dis.opname[operation] not in CALLS:
                continue
            name, (line, end_line, _, end_column) = bytecode.callee(2 * unit), at
            key = (line or 0, end_line or 0, end_column or 0)
            named, nameless = named + bool(name), nameless + (not name)
            plain = name.rpartition(".")[2] if name.startswith(".") else name
            if name and not any(_agrees(plain, name, told) for told in syntax.get(key, ())):
                wrong.append(f"{file.name}:{line} {name}")
    return named, nameless, wrong


def _agrees(plain: str, name: str, told: str) -> bool:
    unmangled = name.replace("._", ".").replace("__", "")
    return (
        told in (name, name.lstrip("."))
        or (name.startswith(".") and told.endswith(f".{plain}"))
        or ("__" in name and told.rpartition("__")[2] == unmangled.rpartition("__")[2] != "")
        or ("__" in name and name.endswith(told.rpartition(".")[2]))
    )


def modules() -> list[Path]:
    files = sorted(STANDARD_LIBRARY.rglob("*.py"))
    return [
        file for file in files if not {"test", "tests", "site-packages", "lib2to3", "dist-packages"} & {*file.parts}
    ]


@pytest.mark.slow
def test_names_agree_with_the_syntax_of_the_standard_library() -> None:
    counts = [compared(file) for file in random.Random(5).sample(modules(), 25)]
    assert [name for _, _, wrong in counts for name in wrong] == []
    assert sum(named for named, _, _ in counts) > 6 * sum(nameless for _, nameless, _ in counts)


@pytest.mark.slow
def test_names_agree_with_the_syntax_of_all_of_the_standard_library() -> None:
    counts = [compared(file) for file in modules()]
    assert [name for _, _, wrong in counts for name in wrong] == []
    assert sum(named for named, _, _ in counts) > 50_000


@pytest.mark.parametrize(
    "version", ["3.11", *(pytest.param(f"3.{minor}", marks=pytest.mark.slow) for minor in range(12, 16))]
)
def test_names_are_those_that_push_the_callable_on_every_python(version: str) -> None:
    patterns = ["importlib/metadata/*.py", "[a-d]*.py"] if version != "3.11" else ["importlib/metadata/*.py", "d*.py"]
    environment = {**os.environ, "PYTHONPATH": str(AGENT)}
    command = [str(python(version)), "-W", "ignore", str(PROGRAM), *patterns]
    told = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
    known = opcodes(told["version"], told["opcodes"])
    assert known is not None
    named = nameless = 0
    wrong = []
    for raw, spans, first_line, names, of_variables, calls in told["codes"]:
        bytecode = Bytecode(
            known, bytes.fromhex(raw), bytes.fromhex(spans), first_line, names=names, variables=of_variables
        )
        for offset, pushed in calls.items():
            name = bytecode.callee(int(offset))
            named, nameless = named + bool(name), nameless + (not name)
            if name and name.rpartition(".")[2] not in pushed:
                wrong.append((name, pushed, first_line))
    assert wrong == []
    assert named > 4 * nameless > 0
