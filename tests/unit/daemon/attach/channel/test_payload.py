"""What is sent into a target."""

import ast
import errno
import fcntl
import marshal
import os
import socket
import threading
import time
from pathlib import Path

import kineto_agent
import pytest
from kinetod.attach.attach_types import AttachCode, AttachError, Deadline
from kinetod.attach.channel import payload
from support.waiting import scaled

FOLDER = Path(kineto_agent.__file__).parent


def document(index: int) -> dict[str, tuple[bool, object]]:
    descriptor = payload.agent().descriptors[index]
    return marshal.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))  # type: ignore[no-any-return]


def test_every_module_that_a_live_agent_can_need_is_there() -> None:
    names = set(document(0))
    assert {
        "kineto_agent",
        "kineto_agent.control.runner",
        "kineto_agent.bootstrap.live_attach",
        "kineto_agent.sources.cupti.gpu_activities",
    } <= names
    assert not {"kineto_agent.__main__", "kineto_agent.bootstrap.loader", "kineto_agent.bootstrap.startup"} & names
    assert set(document(1)) == names


def test_no_module_that_is_sent_needs_one_that_is_not() -> None:
    names = set(document(0))
    for name in names:
        path = FOLDER.joinpath(*name.split(".")[1:])
        text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
        nodes = list(ast.walk(ast.parse(text)))
        needed = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        needed |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        assert not {each for each in needed if each.startswith("kineto_agent")} - names, name


def test_the_payload_is_made_once() -> None:
    assert payload.agent() is payload.agent()


def test_no_target_can_change_what_others_get() -> None:
    for descriptor in payload.agent().descriptors:
        assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) == 0xF
        with pytest.raises(OSError, match=os.strerror(errno.EPERM)):
            os.pwrite(descriptor, b"x", 0)


def pieces(text: str) -> list[tuple[int, str]]:
    """Of a module; each is compiled as if it were in its place."""
    split = list(payload.pieces(text, "<name>"))
    for line, piece, code in split:
        assert code == compile("\n" * (line - 1) + piece, "<name>", "exec", dont_inherit=True)
    return [(line, piece) for line, piece, _code in split]


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER)))
def test_the_pieces_of_a_module_are_the_module(path: Path) -> None:
    text = path.read_text()
    statements = []
    for line, piece in pieces(text):
        statements += ast.parse("\n" * (line - 1) + piece).body
    whole = ast.parse(text)
    pieced = ast.Module(statements, [])
    assert ast.dump(pieced, include_attributes=True) == ast.dump(whole, include_attributes=True)


def test_an_empty_module_is_one_piece() -> None:
    assert pieces("") == [(1, "")]


def test_decorators_and_comments_stay_with_their_statement() -> None:
    text = "x = 1\n" * 39 + "\n# about f\n@first\n@second\ndef f():\n    pass\n"
    assert pieces(text) == [(1, "x = 1\n" * 39), (42, "@first\n@second\ndef f():\n    pass\n")]


@pytest.mark.parametrize(
    "statement",
    [
        'text = """\nlong = 1\n\n# too\n"""\n',
        "listed = [\n*range(3),\n]\n",
        "total = 1 + \\\n2\n",
        "if x:\n    pass\nelif y:\n    pass\nelse:\n    pass\n",
        "try:\n    pass\nexcept ValueError:\n    pass\nfinally:\n    pass\n",
        "def f():\n    pass\n# in f\n    pass\n",
    ],
)
@pytest.mark.parametrize("before", range(30, 42))
def test_a_statement_stays_whole_whatever_its_lines_begin_with(statement: str, before: int) -> None:
    """Wherever in it the first piece has its 40 lines."""
    text = "x = 1\n" * before + statement + "x = 2\n" * 40
    split = pieces(text)
    assert "".join(piece for _line, piece in split) == text
    assert len(split) > 1
    assert sum(statement in piece for _line, piece in split) == 1


def test_what_is_no_python_has_no_pieces() -> None:
    with pytest.raises(SyntaxError, match="line 42"):
        pieces("x = 1\n" * 41 + "x = )\n")


def fake_process(proc: Path, executable: bytes) -> None:
    (proc / "7").mkdir()
    (proc / "7" / "exe").write_bytes(executable)


@pytest.mark.parametrize(
    "executable",
    [
        b"\x7fELF\x02\x01" + bytes(12) + (8).to_bytes(2, "little"),  # MIPS
        b"\x7fELF\x01\x01" + bytes(12) + (62).to_bytes(2, "little"),  # 32 bits
        b"#!/bin/sh" + bytes(20),
    ],
)
def test_a_program_for_another_machine_is_refused(tmp_path: Path, executable: bytes) -> None:
    fake_process(tmp_path, executable)
    with pytest.raises(AttachError, match="process 7 is built for ELF machine") as caught:
        payload.check_machine(7, tmp_path)
    assert caught.value.code is AttachCode.UNSUPPORTED


def test_a_program_that_cannot_be_read_is_gone(tmp_path: Path) -> None:
    with pytest.raises(AttachError, match="executable of process 7 cannot be read") as caught:
        payload.check_machine(7, tmp_path)
    assert caught.value.code is AttachCode.GONE


def answered(answer: bytes | None, seconds: float = 20) -> tuple[AttachCode, str]:
    """What `send` says when the target answers so; None: it hangs up."""
    payload.agent()  # packed once, which counts as loading
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def target() -> None:
        packet, descriptors, _flags, _address = socket.recv_fds(theirs, 65536, 8)
        for descriptor in descriptors:
            os.close(descriptor)
        assert packet == payload.agent().packet
        if answer is None:
            theirs.close()
        else:
            theirs.send(answer)

    thread = threading.Thread(target=target)
    thread.start()
    with ours, theirs, pytest.raises(AttachError) as caught:
        payload.send(ours, os.getpid(), Deadline(scaled(seconds)))
    thread.join()
    return caught.value.code, caught.value.reason


def test_the_targets_own_words_are_the_reason() -> None:
    code, reason = answered(b"EImportError('no\x1b[31m')")
    assert (code, reason) == (
        AttachCode.FAILED,
        f"the agent cannot run in process {os.getpid()}: ImportError('no[31m')",
    )


def test_an_exception_that_the_program_raises_in_our_code_is_a_refusal_of_its() -> None:
    code, reason = answered(b"ERuntimeError('vetoed exec')")
    assert code is AttachCode.UNSUITABLE
    assert "RuntimeError('vetoed exec'). Does one of its audit hooks forbid this" in reason


def test_the_targets_words_are_heard_though_it_has_closed_with_the_packet_unread() -> None:
    payload.agent()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def target() -> None:
        with theirs:
            theirs.recv(1, socket.MSG_PEEK)
            theirs.send(b"EOSError('memfd')")

    thread = threading.Thread(target=target)
    thread.start()
    with ours, pytest.raises(AttachError, match=r"the agent cannot run in process \d+: OSError\('memfd'\)$"):
        payload.send(ours, os.getpid(), Deadline(scaled(20)))
    thread.join()


def test_a_file_that_the_target_may_not_read_is_named_with_its_user() -> None:
    code, reason = answered(b"EImportError('standard library: no re; EACCES 65534 /opt/python/lib/re.py')")
    assert code is AttachCode.UNSUITABLE
    assert "was not allowed to read /opt/python/lib/re.py" in reason
    assert "running as uid 65534, was not allowed to read" in reason


def test_a_target_that_hangs_up_and_lives_has_closed_the_channel() -> None:
    assert answered(None)[0] is AttachCode.UNSUITABLE


def test_a_target_that_says_nothing_is_a_timeout() -> None:
    payload.agent()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    begin = time.monotonic()
    with ours, theirs, pytest.raises(AttachError, match="did not load the agent in time") as caught:
        payload.send(ours, os.getpid(), Deadline(0.2))
    assert caught.value.code is AttachCode.TIMEOUT
    assert time.monotonic() - begin < scaled(5)


def test_a_closed_channel_is_an_error_of_the_target() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    with ours, pytest.raises(AttachError, match="closed the agent's channel") as caught:
        payload.send(ours, os.getpid(), Deadline(1))
    assert caught.value.code is AttachCode.UNSUITABLE
