"""Every test asserts something, by itself or through a helper that is named here."""

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
# What fails by itself: helpers that assert, and runs of programs that do.
CHECKERS = {
    *("raises", "until", "until_gone", "until_marked", "until_said", "soon", "expect_end", "finish"),
    "run",  # support.agent.python_child and the like: the program that is run asserts
    "no_harm_and_all_succeed",
    "note_after",  # of the campaigns of faults
    "denied",
    "assert_array_equal",
    "validate",  # kubernetes_validate
}


def asserts(function: ast.AST) -> bool:
    return any(
        isinstance(node, (ast.Assert, ast.Raise)) or (isinstance(node, ast.Call) and called(node) in CHECKERS)
        for node in ast.walk(function)
    )


def called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def test_every_test_asserts_something() -> None:
    silent = [
        f"{path.relative_to(TESTS)}:{function.lineno} {function.name}"
        for path in TESTS.rglob("test_*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        and function.name.startswith("test_")
        and not asserts(function)
    ]
    assert silent == []
