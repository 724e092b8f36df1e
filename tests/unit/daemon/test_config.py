from pathlib import Path

import pytest
from click.testing import CliRunner
from kinetod.__main__ import command
from kinetod.config import default_agent_socket, default_listen, default_state_dir, parse_listen


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
def test_a_network_address_is_refused_since_there_is_no_tls(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a loopback address\. Without TLS anybody"):
        parse_listen(text)


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
        (["--buffer-limit", "much"], "Invalid value for '--buffer-limit': 'much' is no size; write 128MiB"),
        (["--max-duration", "soon"], "Invalid value for '--max-duration': 'soon' is no duration; write 500ms"),
        (["--max-duration", "0s"], "Invalid value for '--max-duration': must be greater than 0"),
        (["--listen", "0.0.0.0:1"], "Invalid value for '--listen': '0.0.0.0:1' is not a loopback address"),
    ],
)
def test_a_wrong_option_is_named(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_options_come_from_the_environment_too() -> None:
    result = CliRunner().invoke(command, [], env={"KINETOD_MAX_DURATION": "soon"})
    assert str(result.exception) == (
        "KINETOD_MAX_DURATION: captures.max_duration: 'soon' is no duration; write 500ms, 5s or 10min"
    )


def test_every_option_has_help_and_says_its_variable() -> None:
    for option in command.params:
        assert getattr(option, "help", None), option.name
    output = CliRunner().invoke(command, ["--help"]).output
    for name in ("LISTEN", "AGENT_SOCKET", "STATE_DIR", "BUFFER_LIMIT", "MIN_FREE_BYTES", "LOG_LEVEL"):
        assert f"KINETOD_{name}" in output


def test_the_version_is_printed() -> None:
    assert CliRunner().invoke(command, ["--version"]).output == "kinetod, version 0.1.0\n"
