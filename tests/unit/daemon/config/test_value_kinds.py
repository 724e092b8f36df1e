import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kinetod.config.settings import KEYS
from kinetod.config.value_kinds import (
    MAX_DURATION_NS,
    MAX_INT64,
    Choice,
    Count,
    Duration,
    ExistingFile,
    FolderPath,
    ItemError,
    Kind,
    ListOf,
    Maybe,
    SecretFile,
    Size,
    Switch,
    TableOf,
    Text,
    credential_path,
)

SECOND = 10**9


@pytest.mark.parametrize(
    ("kind", "toml", "value"),
    [
        (Duration(), "500ms", SECOND // 2),
        (Duration(), "1.5s", 3 * SECOND // 2),
        (Duration(), "5", 5 * SECOND),
        (Duration(), 5, 5 * SECOND),
        (Duration(), 1.5, 3 * SECOND // 2),
        (Duration(least_ns=0), 0, 0),
        (Duration(least_ns=0), "0", 0),
        (Size(), "128MiB", 128 << 20),
        (Size(), 4096, 4096),
        (Count(1, 64), 64, 64),
        (Switch(), True, True),
        (Choice("debug", "info"), "INFO", "info"),
        (FolderPath(), "/var/lib/kineto", Path("/var/lib/kineto")),
        (Maybe(Duration()), "", None),
        (Maybe(Duration()), "1s", SECOND),
        (ListOf(Size()), ["1KiB", 2], (1024, 2)),
        (ListOf(Size()), "1KiB", (1024,)),
        (TableOf(Count(0)), {"ada": 1}, {"ada": 1}),
    ],
)
def test_what_a_file_may_say(kind: Kind[Any], toml: object, value: Any) -> None:
    assert kind.check(toml) == value


@pytest.mark.parametrize(
    ("kind", "toml", "problem"),
    [
        (Duration(), "5 parsecs", "'5 parsecs' is not a valid duration; expected for example 500ms, 5s or 10min"),
        (Duration(), "x" * 100, f"'{'x' * 77}…' is not a valid duration; expected for example 500ms, 5s or 10min"),
        (Duration(), True, "must be a string in quotes, not a boolean"),
        (Duration(), "0s", "must be greater than 0, got 0"),
        (Duration(), "-1s", "must be greater than 0, got -1s"),
        (Duration(least_ns=0), "-1s", "must be at least 0, got -1s"),
        (Duration(), "100000d", "must be at most 3650d"),
        (Size(), "much", "'much' is not a valid size; expected for example 128MiB, 8GiB or 4096"),
        (Size(), 1.5, "must be a string in quotes, not a decimal number"),
        (Size(), MAX_INT64 + 1, f"must be at most {MAX_INT64}"),
        (Count(1, 64), 65, "must be at most 64"),
        (Count(1, 64), "3", "must be a whole number, not a string"),
        (Count(1), True, "must be a whole number, not a boolean"),
        (Switch(), "yes", "must be true or false, not a string"),
        (Choice("debug", "info"), "loud", "'loud' is not one of debug, info"),
        (FolderPath(), "captures", "'captures' is not an absolute path; it must begin with /"),
        (FolderPath(), "", "is empty; expected a path"),
        (FolderPath(), "/a\0b", "contains a NUL character"),
        (Text(), "x" * 5000, "is longer than 4096 characters"),
        (Text(), {}, "must be a string in quotes, not a table"),
        (TableOf(Text()), [], "must be a table, not a list"),
    ],
)
def test_what_it_may_not(kind: Kind[Any], toml: object, problem: str) -> None:
    with pytest.raises(ValueError) as raised:
        kind.check(toml)
    assert str(raised.value) == problem


def test_a_wrong_item_is_named() -> None:
    kind = TableOf(ListOf(Size()))
    with pytest.raises(ItemError, match="'much' is not a valid size") as raised:
        kind.check({"ada": ["1KiB", "much"]})
    assert raised.value.path == ".ada[1]"


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Count(1), "12", 12),
        (Switch(), "On", True),
        (Switch(), "0", False),
        (ListOf(Size()), "1KiB  2", (1024, 2)),
        (TableOf(Count(0)), "{ada = 1, 'CN=bob' = 2}", {"ada": 1, "CN=bob": 2}),
    ],
)
def test_what_a_variable_may_say(kind: Kind[Any], text: str, value: Any) -> None:
    assert kind.parse(text) == value


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        (Count(1), "a dozen", "'a dozen' is not a whole number"),
        (Switch(), "perhaps", "'perhaps' is neither true nor false"),
        (TableOf(Text()), "ada", "'ada' is not a table; expected for example {ada = 1}"),
        (TableOf(Text()), "{}\nother = {}", "is not a table"),
        (TableOf(Text()), "{a = " + "[" * 4000, "is not a table"),
    ],
)
def test_what_a_variable_may_not(kind: Kind[Any], text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        kind.parse(text)


def test_a_relative_path_of_an_option_is_where_the_daemon_was_started() -> None:
    assert FolderPath().parse("captures") == Path.cwd() / "captures"


@given(st.integers(1, MAX_DURATION_NS))
def test_durations_are_written_exactly(value: int) -> None:
    assert Duration().parse(Duration().show(value).strip('"')) == value


@given(st.integers(1, MAX_INT64))
def test_sizes_are_written_exactly(value: int) -> None:
    assert Size().parse(Size().show(value).strip('"')) == value


@given(st.sampled_from(KEYS), st.text())
def test_any_text_gives_a_value_or_a_value_error(key: Any, text: str) -> None:
    try:
        value = key.kind.parse(text)
    except ValueError:
        return
    assert isinstance(key.kind.show(value), str)


def test_files_must_exist_and_secret_ones_be_private(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    with pytest.raises(ValueError, match=f"{path}: No such file or directory"):
        ExistingFile().check(str(path))
    with pytest.raises(ValueError, match="is not a file"):
        ExistingFile().check(str(tmp_path))
    path.write_text("secret")
    path.chmod(0o644)
    assert ExistingFile().check(str(path)) == path
    with pytest.raises(ValueError, match=rf"can be read by everybody \(mode 0644\); run chmod o-rwx {path}"):
        SecretFile().check(str(path))
    path.chmod(0o640)
    assert SecretFile().check(str(path)) == path


def test_credentials_are_where_the_service_manager_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    with pytest.raises(ValueError, match="'credential:tls': the service manager has passed no credentials"):
        SecretFile().check("credential:tls")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    (tmp_path / "tls").touch(0o400)
    assert SecretFile().check("credential:tls") == tmp_path / "tls"


@pytest.mark.parametrize("name", ["", "..", "../shadow", "a/b"])
def test_a_credential_is_a_plain_name(name: str) -> None:
    with pytest.raises(ValueError, match="does not name a credential"):
        credential_path(f"credential:{name}", {"CREDENTIALS_DIRECTORY": os.sep})
