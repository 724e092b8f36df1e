"""The default file, the effective configuration, and the documents made from the declarations."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import tomllib
from click.testing import CliRunner
from kinetod.__main__ import command, main
from kinetod.config.config_sources import default_file, load
from kinetod.config.settings import KEYS, SECTIONS, Config
from kinetod.config.value_kinds import SettingSpec

REPOSITORY = Path(__file__).parents[4]
ENVIRON = {"CONFIGURATION_DIRECTORY": "/nonexistent/kinetod"}


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_config", REPOSITORY / "docs/generate_config.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_file_and_the_documents_are_current(generator: ModuleType) -> None:
    written = (REPOSITORY / "deploy/config/config.toml").read_text()
    assert written == default_file(), "run `make config-docs`"
    assert (REPOSITORY / "docs/configuration.md").read_text() == generator.document(), "run `make config-docs`"


def test_the_default_file_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(CliRunner().invoke(command, ["--print-default-config"]).output)
    assert load(file, {}, ENVIRON).config == load(None, {}, ENVIRON).config


def test_the_default_file_has_every_key_with_its_default(tmp_path: Path) -> None:
    text = re.sub(r"^#([a-z_0-9]+ = )", r"\1", default_file(), flags=re.MULTILINE)
    tree = tomllib.loads(text)
    assert [f"{section}.{name}" for section, keys in tree.items() for name in keys] == [
        key.name for section in SECTIONS for key in KEYS if key.section == section
    ]
    file = tmp_path / "config.toml"
    file.write_text(text)
    found = load(file, {}, ENVIRON)
    defaults = load(None, {}, ENVIRON).config
    for key in KEYS:
        if not key.default_words:  # the others depend on the user and the host
            assert getattr(found.config, key.field) == getattr(defaults, key.field), key.name


def test_every_field_has_a_key_and_every_key_a_field() -> None:
    assert sorted(key.field for key in KEYS) == sorted(Config.__dataclass_fields__)


def test_names_variables_and_options_are_unique_and_lie_in_a_section() -> None:
    for values in ([key.name for key in KEYS], [key.variable for key in KEYS], [k.option for k in KEYS if k.option]):
        assert len(set(values)) == len(values)
    assert {key.section for key in KEYS} == set(SECTIONS)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_every_key_says_what_it_means(key: SettingSpec) -> None:
    assert len(key.meaning) > 10
    assert not key.meaning.endswith(".")


def test_check_config_prints_every_value_and_where_it_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[captures]\nmax_duration = "5min"\n')
    arguments = ["--config", str(file), "--check-config", "--max-captures", "3", "--no-attach"]
    result = CliRunner().invoke(command, arguments, env={"KINETOD_KEEP_AGENT": "90s"})
    lines = [re.sub(r"  +", "  ", line) for line in result.stdout.splitlines()]
    assert lines[0] == f"# file: {file}"
    assert f'captures.max_duration = "5min"  # {file} line 2' in lines
    assert "captures.max_captures = 3  # --max-captures" in lines
    assert "attach.enabled = false  # --no-attach" in lines
    assert 'attach.keep_agent = "90s"  # KINETOD_KEEP_AGENT' in lines
    assert 'attach.deadline = "10s"  # default' in lines
    tomllib.loads(result.stdout)
    assert (result.exit_code, len(lines)) == (0, 1 + len(KEYS))


def test_check_config_of_a_wrong_file_ends_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    file.write_text('captures.max_captures = 0\nattach.deadline = "soon"\n')
    monkeypatch.setattr("sys.argv", ["kinetod", "--config", str(file), "--check-config"])
    assert main() == 2
    assert capsys.readouterr().err.splitlines() == [
        f"kinetod: {file} line 1: captures.max_captures: must be greater than 0, got 0",
        f"kinetod: {file} line 2: attach.deadline: 'soon' is not a valid duration; expected for example 500ms, 5s or "
        "10min",
    ]
