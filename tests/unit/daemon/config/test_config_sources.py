import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kinetod.config import config_sources
from kinetod.config.config_sources import ConfigError, LoadedConfig, key_lines, load, reloaded
from kinetod.config.settings import BY_NAME, KEYS
from kinetod.config.value_kinds import SettingSpec, Size, Text

ENVIRON = {"XDG_CONFIG_HOME": "/nonexistent", "CONFIGURATION_DIRECTORY": "/nonexistent/kinetod"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.touch(0o600)
    return path


def loaded(file: Path | None, text: str = "", environ: dict[str, str] | None = None, **options: Any) -> LoadedConfig:
    if file is not None:
        file.write_text(text)
    given = {name.replace("__", "."): value for name, value in options.items()}
    return load(file, given, {**ENVIRON, **(environ or {})})


def problems(file: Path, text: str, environ: dict[str, str] | None = None) -> list[str]:
    """Without the folder of the file."""
    with pytest.raises(ConfigError) as raised:
        loaded(file, text, environ)
    return [str(problem).replace(f"{file}", "FILE") for problem in raised.value.problems]


def test_a_share_of_the_disk_stays_free_where_that_is_more(file: Path) -> None:
    status = os.statvfs(file.parent)
    size = status.f_blocks * status.f_frsize
    text = f"[store]\nstate_dir = '{file.parent}/not/there/yet'\nmin_free_percent = 20\n"
    assert loaded(file, text).config.min_free_bytes == max(1 << 30, size * 20 // 100)
    assert loaded(file, f"{text}min_free_bytes = {size}\n").config.min_free_bytes == size
    assert loaded(file, text.replace("20", "0")).config.min_free_bytes == 1 << 30


def test_an_option_counts_more_than_a_variable_than_the_file_than_the_default(file: Path) -> None:
    text = "[captures]\nmax_captures = 2\n\nmax_duration = '2s'\nbuffer_limit = 2\n"
    variables = {"KINETOD_MAX_CAPTURES": "3", "KINETOD_MAX_DURATION": "3s", "KINETOD_KEEP_AGENT": ""}
    found = loaded(file, text, variables, captures__max_captures=4)
    config = found.config
    assert (config.max_captures, config.max_duration_ns, config.buffer_limit_bytes) == (4, 3 * 10**9, 2)
    assert config.keep_agent_ns == 600 * 10**9  # an empty variable says nothing
    assert {name: source for name, source in found.sources.items() if source != "default"} == {
        "captures.max_captures": "--max-captures",
        "captures.max_duration": "KINETOD_MAX_DURATION",
        "captures.buffer_limit": f"{file} line 5",
    }


def test_without_a_file_everything_is_the_default() -> None:
    found = load(None, {}, ENVIRON)
    assert found.path is None
    assert set(found.sources.values()) == {"default"}


def test_a_file_by_variable_must_exist_as_one_by_option(tmp_path: Path) -> None:
    for path, environ in ((tmp_path / "no", {}), (None, {"KINETOD_CONFIG": str(tmp_path / "no")})):
        with pytest.raises(ConfigError, match=f"^{tmp_path}/no: No such file or directory; name another file"):
            load(path, {}, {**ENVIRON, **environ})


def test_everything_that_is_wrong_is_said_at_once(file: Path) -> None:
    text = """\
[server]
listen = ["unix:/run/a.sock", "nowhere"]
state_dir = "/var/lib/kineto"

[captures]
max_duration = "5 parsecs"
max_capture = 3
max_trace_bytes = true

[capture]
a = 1
"""
    assert problems(file, text, {"KINETOD_ATTACH_DEADLINE": "soon"}) == [
        "FILE line 3: server.state_dir: there is no such key; did you mean store.state_dir?",
        "FILE line 7: captures.max_capture: there is no such key; did you mean captures.max_captures?",
        "FILE line 10: capture: there is no such section; did you mean captures?",
        "FILE line 2: server.listen[1]: expected unix:/path or host:port, got 'nowhere'",
        "FILE line 6: captures.max_duration: '5 parsecs' is not a valid duration; expected for example "
        "500ms, 5s or 10min",
        "FILE line 8: captures.max_trace_bytes: must be a string in quotes, not a boolean",
        "KINETOD_ATTACH_DEADLINE: attach.deadline: 'soon' is not a valid duration; expected for example "
        "500ms, 5s or 10min",
    ]


def test_what_is_overridden_must_be_right_too(file: Path) -> None:
    assert problems(file, "captures.max_captures = 0", {"KINETOD_MAX_CAPTURES": "3"}) == [
        "FILE line 1: captures.max_captures: must be greater than 0, got 0"
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[captures\n", "FILE line 1: is not valid TOML: Expected ']' at the end of a table declaration (column 10)"),
        ("a = 1\na = 2\n", "FILE line 2: is not valid TOML: Cannot overwrite a value (column 6)"),
        ("captures = 1\n", "FILE line 1: captures: is a section, not a key: write [captures]"),
        ("[[captures]]\n", "FILE line 1: captures: is a section, not a key: write [captures]"),
        ("max_captures = 1\n", "FILE line 1: max_captures: there is no such key; did you mean captures.max_captures?"),
        ("zzz = 1\n", "FILE line 1: zzz: there is no such key"),
        ("a = " + "[" * 100_000, "FILE: cannot be read as TOML: values are nested too deeply"),
        ("#" * (1 << 21), "FILE: cannot be read as TOML: it is longer than 1048576 bytes"),
    ],
)
def test_what_is_no_configuration(file: Path, text: str, problem: str) -> None:
    assert problems(file, text) == [problem]


def test_what_is_no_text_or_no_file(file: Path, tmp_path: Path) -> None:
    file.write_bytes(b"# a\n# \xff\n")
    with pytest.raises(ConfigError, match="line 2: is not UTF-8 text"):
        load(file, {}, ENVIRON)
    with pytest.raises(ConfigError, match=r"no regular file|Is a directory"):
        load(tmp_path, {}, ENVIRON)


def test_a_file_that_everybody_can_change_is_refused(file: Path) -> None:
    file.chmod(0o646)
    assert problems(file, "") == ["FILE: can be changed by everybody (mode 0646); run chmod o-w FILE"]


def test_a_secret_in_a_file_that_everybody_can_read_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # No setting is a secret itself so far: this one borrows a field.
    key = SettingSpec(
        name="store.password", field="log_level", kind=Text(), default="", meaning="a password", secret=True
    )
    monkeypatch.setattr(config_sources, "KEYS", (*KEYS, key))
    monkeypatch.setitem(BY_NAME, key.name, key)
    file.chmod(0o644)
    assert problems(file, "store.password = 'sesame'") == [
        "FILE line 1: store.password: is a secret, but everybody can read the file (mode 0644); run chmod o-rwx FILE"
    ]
    file.chmod(0o640)
    assert loaded(file, "store.password = 'sesame'").config.log_level == "sesame"
    assert key.show("sesame") == '"(not shown)"'


def test_variables_that_mean_nothing_are_named(file: Path) -> None:
    found = loaded(file, "", {"KINETOD_MAX_DURATON": "5s", "KINETOD_CONFIG": str(file)})
    assert found.warnings == (
        "kinetod has no environment variable KINETOD_MAX_DURATON; did you mean KINETOD_MAX_DURATION?",
    )


def test_rules_between_settings_name_the_key_and_its_source(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [("attach.deadline", "is too long"), ("access.certificates.CN=a.b", "is strange")]
    monkeypatch.setattr(config_sources, "RULES", (lambda _config: wrong,))
    assert problems(file, "[attach]\ndeadline = '5s'\n") == [
        "FILE line 2: attach.deadline: is too long",
        "default: access.certificates.CN=a.b: is strange",
    ]


def test_a_reload_takes_what_it_can(file: Path) -> None:
    running = loaded(file, "").config
    fresh = replace(running, max_captures=3, decode_workers=9)
    config, changed, waiting = reloaded(running, fresh)
    assert config == replace(running, max_captures=3)
    assert [key.name for key in changed] == ["captures.max_captures"]
    assert [key.name for key in waiting] == ["captures.decode_workers"]


def test_lines_of_keys_are_found_through_what_toml_allows() -> None:
    text = """\
a.b = '''
[not.a.section]
c = 1
'''
"d" . e = [
  1,
]  # x = 1
[ f . "g" ] # comment
h = "#[i]"
[[j]]
k = { l = 1 }
"""
    assert key_lines(text) == {"a.b": 1, "d.e": 5, "f.g": 8, "f.g.h": 9, "j": 10, "j.k": 11}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.sampled_from(
            ["[captures]", "[attach]", "max_duration", "=", '"5s"', "'", '"""', "{", "}", "[", "]", ".", "1"]
        )
        | st.text(max_size=4),
        max_size=30,
    ).map("".join)
)
def test_any_file_gives_a_configuration_or_its_problems(tmp_path: Path, text: str) -> None:
    file = tmp_path / "fuzzed.toml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        load(file, {}, ENVIRON)
    except ConfigError as exc:
        assert exc.problems


def test_size_of_any_kind_is_shown_as_it_is_read(file: Path) -> None:
    assert loaded(file, f"captures.buffer_limit = {Size().show(3 << 20)}").config.buffer_limit_bytes == 3 << 20
