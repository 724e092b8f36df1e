import os
import socket
from pathlib import Path

from kinetod.kineto_ipc.poll_sockets import Holder, holder

UNIX = """\
Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00000000 0002 01  1674 @dynolog@
0000000000000000: 00000002 00000000 00000000 0002 01 21674 @dynolog
0000000000000000: 00000003 00000000 00000000 0001 03 21675
0000000000000000: 00000002 00000000 00000000 0002 01 21676 /run/ipc dir/dynolog
"""


def proc_with(folder: Path, sockets: dict[int, tuple[str, str]]) -> Path:
    """sockets: name and inode by pid."""
    (folder / "self/net").mkdir(parents=True)
    (folder / "self/net/unix").write_text(UNIX)
    for pid, (name, inode) in sockets.items():
        (folder / str(pid) / "fd").mkdir(parents=True)
        (folder / str(pid) / "comm").write_text(f"{name}\n")
        if inode:
            (folder / str(pid) / "fd/5").symlink_to(f"socket:[{inode}]")
    return folder


def test_the_process_with_the_socket_is_found_whatever_it_is_called(tmp_path: Path) -> None:
    proc = proc_with(tmp_path, {7: ("dynolog", "21674"), 8: ("monitor", "1674"), 9: ("else", "21676")})
    assert holder("@dynolog@", proc) == Holder(8, "monitor")
    assert holder("/run/ipc dir/dynolog", proc) == Holder(9, "else")


def test_where_descriptors_cannot_be_read_the_name_is_a_guess(tmp_path: Path) -> None:
    found = holder("@dynolog@", proc_with(tmp_path, {7: ("bash", ""), 8: ("dynolog", "")}))
    assert found == Holder(8, "dynolog", guessed=True)
    assert str(found) == "process 8 (dynolog, judging by its name)"


def test_nobody_is_named_who_is_not_known(tmp_path: Path) -> None:
    assert holder("@dynolog@", proc_with(tmp_path, {7: ("bash", "1675")})) is None
    assert holder("@dynolog@", tmp_path / "no") is None


def test_a_real_socket_is_found() -> None:
    name = f"kinetod-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0{name}\0")
        found = holder(f"@{name}@")
    assert found is not None and (found.pid, found.guessed) == (os.getpid(), False)
