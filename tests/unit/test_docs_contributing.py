"""What newcomers are told about the repository is true."""

import re
from pathlib import Path

import pytest
import yaml
from kineto_agent import __version__

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
FOLDERS = ("agent", "cli", "daemon", "protos", "tests")


def test_the_hook_for_git_runs_what_ci_runs() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = repository["hooks"]
    assert (repository["repo"], hook["entry"], hook["language"]) == ("local", "make lint", "system")
    assert re.search(r"^test: lint\b", MAKEFILE, re.MULTILINE)


def test_lint_looks_for_phrases_that_may_not_come_back() -> None:
    (recipe,) = re.findall(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert "tests/unit/test_english.py" in recipe


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/getting-started.md", "docs/index.md"])
def test_the_targets_of_make_exist(name: str) -> None:
    named = set(re.findall(r"(?:`|^)make ([a-z-]+)", (ROOT / name).read_text(), re.MULTILINE))
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
    assert {target for target in named if target not in targets and not target.endswith("-")} == set()


def without_indentation(text: str) -> str:
    return re.sub(r"^ +", "", text, flags=re.MULTILINE)


def test_examples_of_style_are_taken_from_the_code() -> None:
    code = without_indentation("\n".join(path.read_text() for each in FOLDERS for path in (ROOT / each).rglob("*.py")))
    examples = [without_indentation(text) for text in re.findall(r"```python\n(.*?)```", CONTRIBUTING, re.DOTALL)]
    assert len(examples) >= 4
    assert [example for example in examples if example not in code] == []


@pytest.mark.parametrize(
    "name", ["CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md"]
)
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text())
    assert [target for target in targets if "://" not in target and not (path.parent / target).exists()] == []


def test_the_changelog_has_the_customary_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version) for version in versions[1:])
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert __version__ in text
