"""docs/how-to-add.md followed: a setting of the daemon."""

from pathlib import Path

import pytest
from support.machine.source_tree import SourceTree, leads_to

pytestmark = pytest.mark.slow

MODULE = "daemon/kinetod/config/settings.py"
BEFORE = """\
        meaning="how many captures may run at the same time",
    )
"""
SETTING = """\
    idle_limit_ns: int = setting(
        "captures.idle_limit", Duration(), 60 * SECOND_NS, option="--idle-limit", reload=True,
        meaning="how long a capture may record nothing before it ends",
    )
"""
ROW = (
    '| `captures.idle_limit` | duration | `"1min"` | `--idle-limit` | `KINETOD_IDLE_LIMIT` | yes '
    "| how long a capture may record nothing before it ends |\n"
)
USE = "from kinetod.config.config_sources import load; print(load(None, {}).config.idle_limit_ns)"


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    tree = SourceTree(tmp_path / "tree")
    tree.insert(MODULE, BEFORE, SETTING)
    return tree


def test_a_setting_takes_one_declaration_and_then_has_its_option_its_variable_its_key_and_its_documentation(
    tree: SourceTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = " ".join(tree.python("-m", "kinetod", "--help").split())
    assert (
        "--idle-limit DURATION How long a capture may record nothing before it ends. "
        "[env var: KINETOD_IDLE_LIMIT; default: 1min]"
    ) in words
    file = tmp_path / "config.toml"
    file.write_text('[captures]\nidle_limit = "2s"\n')
    check = ("-m", "kinetod", "--check-config", "--config", str(file))
    assert f'captures.idle_limit = "2s" # {file} line 2' in _effective(tree, *check)
    monkeypatch.setenv("KINETOD_IDLE_LIMIT", "3s")
    assert 'captures.idle_limit = "3s" # KINETOD_IDLE_LIMIT' in _effective(tree, *check)
    assert 'captures.idle_limit = "4s" # --idle-limit' in _effective(tree, *check, "--idle-limit", "4s")
    assert tree.python("-c", USE) == "3000000000\n"
    tree.python("docs/generate_config.py")
    assert ROW in tree.text("docs/configuration.md")
    assert '#idle_limit = "1min"\n' in tree.text("deploy/config/config.toml")
    assert all(leads_to("A setting of the daemon", path) for path in tree.edited)


def test_a_wrong_value_of_it_is_refused_with_its_place_and_what_is_expected(tree: SourceTree, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[captures]\nidle_limit = "soon"\n')
    problem = "captures.idle_limit: 'soon' is not a valid duration; expected for example 500ms, 5s or 10min"
    with pytest.raises(AssertionError, match=f"^kinetod: {file} line 2: {problem}\n"):
        tree.python("-m", "kinetod", "--check-config", "--config", str(file))


def _effective(tree: SourceTree, *words: str) -> list[str]:
    return [" ".join(line.split()) for line in tree.python(*words).splitlines()]
