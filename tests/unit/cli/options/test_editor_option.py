"""Which editors links may lead to."""

import pytest
from kinetoctl.options.editor_option import EDITORS, parse_editor


@pytest.mark.parametrize("name", EDITORS)
def test_an_editor_is_known_by_its_name(name: str) -> None:
    assert parse_editor(name) == EDITORS[name]


@pytest.mark.parametrize(
    "text", ["vscode://vscode-remote/ssh-remote+node7{path}:{line}", "http://localhost:63342/api/file/{path}:{line}"]
)
def test_a_template_has_a_path_and_a_line(text: str) -> None:
    assert parse_editor(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "emacs",
        "vscode://file{path}",
        "vscode://file:{line}",
        "javascript:alert('{path}{line}')",
        "data:text/html,{path}{line}",
        "{path}:{line}",
        "//host/{path}:{line}",
        "vscode://file{path} {line}",
        "JavaScript:{path}{line}",
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected vscode, cursor, pycharm, or an address"):
        parse_editor(text)
