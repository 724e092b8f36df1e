"""Packets between the front end and the writer service, and writer.toml: what is allowed is never more than it says."""

import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePath

from kinetod.base.policy_file import PolicyError
from kinetod.trace_writing import writer_messages as messages
from kinetod.trace_writing import writer_server

_file = Path(tempfile.mkdtemp(prefix="fuzz-writer-")) / "writer.toml"
_file.touch(0o600)


def play(data: bytes) -> None:
    try:
        asked = messages.request(data)
    except messages.BadWriterMessage as exc:
        assert len(str(exc)) < 4000
    else:
        assert messages.request(messages.encode(asked)) == asked
    try:
        said = messages.answer(data)
    except messages.BadWriterMessage:
        pass
    else:
        assert messages.answer(messages.encode(said)) == said
    _file.write_bytes(data)
    try:
        found = writer_server.load(_file, uid_of={"kineto": 900, "ada": 1001, "root": 0}.__getitem__)
    except PolicyError as exc:
        assert str(exc).startswith(str(_file))
        return
    for uid in (0, 1, 900, 1001, 65534, 2**32 - 2):
        named = found.named
        if (uid and uid in named.callers) or uid in named.denied or uid == named.own_uid or uid not in named.users:
            assert found.refuses_user(uid)
    for folder in ("/", "/scratch/../etc", "scratch", "/scratch"):
        root = found.root_of(PurePath(folder))
        assert root is None or (root in found.roots and PurePath(folder).is_relative_to(root) and ".." not in folder)


def seeds() -> Iterator[bytes]:
    """One of each message, the defaults of the policy, and everything said."""
    for message in (
        messages.PlaceTraces(uid=1000, folder="/scratch/traces/ada", names=("t_7.json", "t_8.json.gz")),
        messages.PlaceTraces(uid=None, folder="/scratch"),
        messages.TracesPlaced(problems=("", "t_8.json.gz: No space left on device")),
    ):
        yield messages.encode(message)
    yield b""
    yield (
        b'callers = ["kineto", 905]\nroots = ["/scratch", "/data/traces"]\nusers = ["1000-60000", "ada", "root"]\n'
        b'denied_users = [1005]\nmax_file = "1GiB"\n'
    )
    yield b'users = ["*"]\nroots = ["/"]\n'
