from pathlib import Path

import pytest
from kinetod.config.addresses import (
    ProfileForm,
    checked_profiles,
    checked_webhook,
    default_agent_socket,
    default_config_file,
    default_listen,
    default_state_dir,
    parse_listen,
    parse_profiles,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/kineto/kinetod.sock", "unix:/run/kineto/kinetod.sock"),
        ("127.0.0.1:50051", "127.0.0.1:50051"),
        ("localhost:50051", "localhost:50051"),
        ("[::1]:50051", "[::1]:50051"),
    ],
)
def test_addresses(text: str, address: str) -> None:
    assert str(parse_listen(text)) == address


@pytest.mark.parametrize("text", ["", "localhost", "localhost:", "localhost:http", "localhost:99999", ":1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected unix:/path or host:port"):
        parse_listen(text)


def test_a_socket_path_must_be_absolute_and_fit() -> None:
    with pytest.raises(ValueError, match=r"expected an absolute socket path, got 'a\.sock'"):
        parse_listen("unix:a.sock")
    with pytest.raises(ValueError, match="is longer than 107 bytes"):
        parse_listen("unix:/" + "x" * 107)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("http://ci/hook", "would send data to another host unencrypted"),
        ("ftp://ci/hook", "expected https://host/path"),
        ("https:///hook", "expected https://host/path"),
        ("https://user:pw@ci/hook", "contains a user or password"),
        ("https://ci/hook#x", "has a fragment"),
        ("https://ci:99999/", "[Pp]ort"),
        ("https://ci/a b", "expected https://host/path"),
    ],
)
def test_other_addresses_of_webhooks_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        checked_webhook(text)


def test_defaults_of_root_are_the_systems_folders() -> None:
    assert str(default_listen(0, {})) == "unix:/run/kineto/kinetod.sock"
    assert default_agent_socket(0, {}) == Path("/run/kineto/agent.sock")
    assert default_state_dir(0, {}) == Path("/var/lib/kineto")


def test_defaults_of_a_user_are_its_own_folders() -> None:
    environ = {"XDG_RUNTIME_DIR": "/run/user/1000", "XDG_STATE_HOME": "/home/ada/.state"}
    assert str(default_listen(1000, environ)) == "unix:/run/user/1000/kineto/kinetod.sock"
    assert default_state_dir(1000, environ) == Path("/home/ada/.state/kineto")


def test_a_service_has_the_folders_that_systemd_made_for_it() -> None:
    environ = {
        "RUNTIME_DIRECTORY": "/run/kineto",
        "STATE_DIRECTORY": "/var/lib/other:/var/lib/kineto",
        "CONFIGURATION_DIRECTORY": "/etc/kinetod",
    }
    assert str(default_listen(77, environ)) == "unix:/run/kineto/kinetod.sock"
    assert default_agent_socket(77, environ) == Path("/run/kineto/agent.sock")
    assert default_state_dir(77, environ) == Path("/var/lib/kineto")
    assert default_config_file(77, environ) == Path("/etc/kinetod/config.toml")


def test_a_daemon_started_by_another_service_does_not_take_its_folders() -> None:
    assert default_state_dir(0, {"STATE_DIRECTORY": "/var/lib/slurmd"}) == Path("/var/lib/kineto")


def test_a_daemon_of_ones_own_does_not_read_the_systems_file() -> None:
    assert default_config_file(0, {}) == Path("/etc/kinetod/config.toml")
    assert default_config_file(77, {"XDG_CONFIG_HOME": "/home/ada/.c"}) == Path("/home/ada/.c/kinetod/config.toml")


@pytest.mark.parametrize(
    ("text", "form", "url", "secure"),
    [
        ("otlp+https://c:4318", ProfileForm.OTLP_HTTP, "https://c:4318/v1development/profiles", True),
        ("otlp+https://c/otlp/", ProfileForm.OTLP_HTTP, "https://c/otlp/v1development/profiles", True),
        ("otlp+http://127.0.0.1:1/v1development/profiles", ProfileForm.OTLP_HTTP,
         "http://127.0.0.1:1/v1development/profiles", False),
        ("otlp+grpcs://c:4317", ProfileForm.OTLP_GRPC, "c:4317", True),
        ("otlp+grpc://[::1]:4317/", ProfileForm.OTLP_GRPC, "[::1]:4317", False),
        ("pyroscope+https://p:4040", ProfileForm.PYROSCOPE, "https://p:4040/push.v1.PusherService/Push", True),
        ("pyroscope+http://localhost:4040/x", ProfileForm.PYROSCOPE,
         "http://localhost:4040/x/push.v1.PusherService/Push", False),
    ],
)  # fmt: skip
def test_an_address_says_what_is_sent_where(text: str, form: ProfileForm, url: str, secure: bool) -> None:
    found = parse_profiles(text)
    assert (found.form, found.url, found.secure) == (form, url, secure)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("https://c:4318", r"expected otlp\+https://host:4318, otlp\+grpcs://host:4317 or pyroscope"),
        ("otlp+https://", "expected otlp"),
        ("otlp+https://c :4318", "expected otlp"),
        ("otlp+https://me:secret@c", "hooks.profiles_headers"),
        ("otlp+https://c?key=1", "has a query or fragment"),
        ("otlp+https://c:99999", "out of range"),
        ("otlp+http://c:4318", r"would send data to another host unencrypted; use otlp\+https://"),
        ("otlp+grpc://c:4317", r"use otlp\+grpcs://"),
        ("otlp+grpcs://c", "host:port without a path"),
        ("otlp+grpcs://c:1/x", "host:port without a path"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_write_instead(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        checked_profiles(text)


def test_empty_is_nowhere() -> None:
    assert checked_profiles("") == ""
