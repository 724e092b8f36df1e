from pathlib import Path

import pytest
from click.testing import CliRunner
from kinetod.__main__ import command
from kinetod.config.addresses import parse_listen
from kinetod.config.default_paths import default_agent_socket, default_config_file, default_listen, default_state_dir


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


@pytest.mark.parametrize("text", ["0.0.0.0:1", "[::]:1", "10.0.0.7:1", "gpu-host:1"])
def test_a_network_address_is_refused_without_certificates(text: str) -> None:
    result = CliRunner().invoke(command, ["--check-config", "--listen", text])
    assert "is not a loopback address and needs certificates" in str(result.exception)


@pytest.mark.parametrize("text", ["", "localhost", "localhost:", "localhost:http", "localhost:99999", ":1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected unix:/path or host:port"):
        parse_listen(text)


def test_a_socket_path_must_be_absolute_and_fit() -> None:
    with pytest.raises(ValueError, match=r"expected an absolute socket path, got 'a\.sock'"):
        parse_listen("unix:a.sock")
    with pytest.raises(ValueError, match="is longer than 107 bytes"):
        parse_listen("unix:/" + "x" * 107)


def test_defaults_of_root_are_the_systems_folders() -> None:
    assert str(default_listen(0, {})) == "unix:/run/kineto/kinetod.sock"
    assert default_agent_socket(0, {}) == Path("/run/kineto/agent.sock")
    assert default_state_dir(0, {}) == Path("/var/lib/kineto")


def test_defaults_of_a_user_are_its_own_folders() -> None:
    environ = {"XDG_RUNTIME_DIR": "/run/user/1000", "XDG_STATE_HOME": "/home/ada/.state"}
    assert str(default_listen(1000, environ)) == "unix:/run/user/1000/kineto/kinetod.sock"
    assert default_state_dir(1000, environ) == Path("/home/ada/.state/kineto")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--buffer-limit", "much"],
            "Invalid value for '--buffer-limit': 'much' is not a valid size; expected for example 128MiB",
        ),
        (
            ["--max-duration", "soon"],
            "Invalid value for '--max-duration': 'soon' is not a valid duration; expected for example 500ms",
        ),
        (["--max-duration", "0s"], "Invalid value for '--max-duration': must be greater than 0"),
        (["--listen", "nowhere"], "Invalid value for '--listen': expected unix:/path or host:port, got 'nowhere'"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_options_come_from_the_environment_too() -> None:
    result = CliRunner().invoke(command, [], env={"KINETOD_MAX_DURATION": "soon"})
    assert str(result.exception) == (
        "KINETOD_MAX_DURATION: captures.max_duration: 'soon' is not a valid duration; expected for example "
        "500ms, 5s or 10min"
    )


def test_every_option_has_help_and_says_its_variable() -> None:
    for option in command.params:
        assert getattr(option, "help", None), option.name
    output = CliRunner().invoke(command, ["--help"]).output
    for name in ("LISTEN", "AGENT_SOCKET", "STATE_DIR", "BUFFER_LIMIT", "MIN_FREE_BYTES", "LOG_LEVEL"):
        assert f"KINETOD_{name}" in output


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


def test_the_version_is_printed() -> None:
    assert CliRunner().invoke(command, ["--version"]).output == "kinetod, version 0.1.0\n"
