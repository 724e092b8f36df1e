import pytest
from click.testing import CliRunner
from kinetod.__main__ import command


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


def test_the_version_is_printed() -> None:
    assert CliRunner().invoke(command, ["--version"]).output == "kinetod, version 0.1.0\n"
