"""Every error and every reason code says what to do next."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kinetoctl import errors
from kinetoctl.base.reason_codes import Explanation, advices, explanations, remedy

SOURCES = Path(errors.__file__).parent
# What a remedy begins with, if not with a command: something to do.
VERBS = {
    "arm", "ask", "check", "connect", "correct", "delete", "do", "end", "fetch", "free", "install", "leave", "look",
    "mend", "name", "raise", "record", "remove", "report", "resume", "run", "see", "select", "set", "start", "trace",
    "try", "unpin", "use", "wait", "watch", "add",
}  # fmt: skip
COMMAND = re.compile(r"`(kinetoctl|kinetod|kubectl|squeue|journalctl|pip|ls|df|command)\b[^`]*`|--[a-z]")


def classes(base: type[errors.CliError]) -> Iterator[type[errors.CliError]]:
    for each in base.__subclasses__():
        yield each
        yield from classes(each)


@pytest.mark.parametrize("error", sorted(classes(errors.CliError), key=str))
def test_every_class_of_errors_names_the_next_command_or_option(error: type[errors.CliError]) -> None:
    assert COMMAND.search(error.help_text), error.help_text
    assert error.help_text.endswith(".")
    assert max(map(len, error.help_text.splitlines())) <= 120


def test_no_error_is_raised_that_has_no_class_of_its_own_and_so_no_remedy() -> None:
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                assert ast.unparse(node.exc.func).rpartition(".")[2] != "CliError", path


@pytest.mark.parametrize("row", explanations(), ids=lambda row: f"{row.code}-{row.where}")
def test_every_reason_code_says_what_to_do(row: Explanation) -> None:
    first = re.split(r"[\s,;:]", row.remedy)[0]
    assert first in VERBS or COMMAND.match(row.remedy), row.remedy


@pytest.mark.parametrize("code", sorted({row.code for row in explanations()}))
def test_an_error_with_a_reason_code_ends_with_the_command_that_explains_it(code: str) -> None:
    assert advices(errors.Refused("no", reason_code=code)) == [
        f"Run `kinetoctl explain {code}` for advice.",
        errors.Refused.help_text,
    ]


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("BUSY", "trace again once it has ended"),  # not that of a call which is refused
        ("ATTACH_GONE", "trace a process that is still running: `kinetoctl ps` lists them"),
        ("OF_A_NEWER_DAEMON", ""),
        ("", ""),
    ],
)
def test_the_remedy_is_that_of_a_verdict(code: str, text: str) -> None:
    assert remedy(code) == text


def test_an_error_with_an_unknown_reason_code_or_none_ends_with_the_advice_of_its_class() -> None:
    for code in ("", "OF_A_NEWER_DAEMON"):
        assert advices(errors.TimedOut("late", reason_code=code)) == [errors.TimedOut.help_text]
