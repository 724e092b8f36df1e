"""attach.toml: a policy, or a PolicyError. What is allowed is never more than the file says."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from kinetod.attach_helper import allow_list
from kinetod.base.policy_file import PolicyError

_file = Path(tempfile.mkdtemp(prefix="fuzz-policy-")) / "attach.toml"
_file.touch(0o600)


def play(data: bytes) -> None:
    _file.write_bytes(data)
    try:
        found = allow_list.load(_file, uid_of={"kineto": 900, "ada": 1001}.__getitem__)
    except PolicyError as exc:
        assert str(exc).startswith(str(_file))
        return
    for uid in (0, 1, 900, 1001, 65534, 2**32 - 1):
        owner = allow_list.ProcessOwner((uid,) * 4, container=False)
        if uid in found.callers or (uid and uid in found.denied) or uid == found.own_uid != 0:
            assert found.refuses_owner(owner, administrator=True)
        if uid == 0 and found.root != allow_list.ALWAYS:
            assert found.refuses_owner(owner, administrator=True)
        assert not found.callers.everybody


def seeds() -> Iterator[bytes]:
    """The defaults, and everything said."""
    yield b""
    yield (
        b'callers = ["kineto", 905]\nusers = ["1000-60000", "ada"]\ndenied_users = [1005]\nroot = "never"\n'
        b'protected = "administrators"\nkubelet_socket = "/var/lib/kubelet/pod-resources/kubelet.sock"\n'
    )
    yield b'users = ["*"]\nroot = "always"\nprotected = "always"\n'
