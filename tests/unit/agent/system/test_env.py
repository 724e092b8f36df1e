import os
import re
import struct
import sys
from pathlib import Path

import pytest
from kineto_agent.sources.cupti import libcupti
from kineto_agent.system import env


def test_the_variable_alone_decides_where_to_look() -> None:
    assert env.agent_socket_candidates({"KINETO_AGENT_SOCKET": "/x/y.sock"}) == ["/x/y.sock"]


def test_the_system_daemon_comes_before_the_users_own() -> None:
    assert env.agent_socket_candidates({"XDG_RUNTIME_DIR": "/run/user/5"}, uid=5) == [
        "/run/kineto/agent.sock",
        "/run/user/5/kineto/agent.sock",
        "/tmp/kineto-5/agent.sock",
    ]


def test_without_a_runtime_dir_the_folder_of_the_effective_user_is_tried() -> None:
    assert env.agent_socket_candidates({}) == [
        "/run/kineto/agent.sock",
        "/tmp/kineto-%d/agent.sock" % os.geteuid(),
    ]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="kineto_protos needs 3.11")
def test_the_daemon_listens_where_the_agent_looks() -> None:
    endpoints = pytest.importorskip("kineto_protos.endpoints")
    for uid in (0, 1000):
        for environ in ({}, {"XDG_RUNTIME_DIR": "/run/user/1000"}):
            path = endpoints.runtime_dir(uid, environ) / endpoints.AGENT_SOCKET_NAME
            assert str(path) in env.agent_socket_candidates(environ, uid=uid)


@pytest.mark.parametrize(("value", "on"), [("", False), ("0", False), ("1", True), ("yes", True)])
def test_kineto_agent_is_on_unless_empty_or_zero(value: str, on: bool) -> None:
    assert env.is_on({"KINETO_AGENT": value}) is on


def test_an_unset_variable_means_what_the_caller_says() -> None:
    assert env.is_on({}) is False
    assert env.is_on({}, default="1") is True


@pytest.mark.parametrize(("secure", "elevated"), [(0, False), (1, True)])
def test_the_kernel_says_whether_a_program_has_rights_that_its_caller_lacks(
    tmp_path: Path, secure: int, elevated: bool
) -> None:
    vector = tmp_path / "auxv"
    vector.write_bytes(struct.pack("8L", 6, 4096, 23, secure, 25, 7, 0, 0))
    assert env.is_elevated(str(vector)) is elevated
    vector.write_bytes(vector.read_bytes()[:-5])  # never seen, and no reason to raise
    assert env.is_elevated(str(vector)) is elevated
    assert env.is_elevated() is env.is_elevated(str(tmp_path / "none")) is False


def test_the_library_that_a_variable_names_is_not_loaded_with_rights_that_its_writer_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environ = {env.CUPTI_LIBRARY: "/tmp/evil.so"}
    assert libcupti.find(environ, "/dev/null") == "/tmp/evil.so"
    monkeypatch.setattr(env, "is_elevated", lambda: True)
    assert libcupti.find(environ, "/dev/null") is None


def test_every_variable_that_the_agent_names_is_a_constant_of_this_module() -> None:
    constants = {value for value in vars(env).values() if isinstance(value, str) and value.startswith("KINETO_")}
    package = Path(env.__file__).parents[1]
    words = {
        word.strip("\"'`(),.:;=[]")
        for path in package.rglob("*.py")
        for word in path.read_text().split()
        if "KINETO_" in word and path.name != "collector_binding.py"
    }
    assert {word for word in words if re.fullmatch("KINETO_[A-Z_]+", word)} <= constants
