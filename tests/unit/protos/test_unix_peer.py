import os
import socket

import pytest
from kineto_protos import unix_peer

CAN_REFUSE = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (6, 16)


@pytest.mark.skipif(not CAN_REFUSE, reason="Linux 6.16 is the first that can")
def test_no_descriptor_can_be_passed_to_what_a_listener_accepts() -> None:
    name = f"\0kineto-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        unix_peer.refuse_descriptors(listener)
        listener.bind(name)
        listener.listen()
        client.connect(name)
        with pytest.raises(PermissionError):
            socket.send_fds(client, [b"x"], [0])
        accepted, _ = listener.accept()
        with accepted, pytest.raises(PermissionError):
            socket.send_fds(client, [b"x"], [0])
