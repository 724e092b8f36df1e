from pathlib import Path

from kinetod.config.default_paths import default_agent_socket, default_config_file, default_listen, default_state_dir


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
