"""An attach helper that does what its argument says, in the place of `kinetod.attach_helper.attach_worker`.

`agent`: the helper itself is the target: it makes the channel and an agent at its other end, so that a test asks for
the helper's own pid. The agent says Hello, and leaves when its link is closed. `mute`: likewise, without the Hello.
`refuse`, `crash`, `hang`, `babble`: what the words say. `channel-missing`: says that all is well, and sends nothing.
`look-hangs`: answers all but what asks for files of device code. `attach-hangs`: likewise, all but attaches.
`killed`: is killed at the first three requests of all; the fourth helper refuses. `killed-always`: is killed at each.
"""

import json
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[3] / "agent")]

from kineto_agent.protocol import wire

from support.agent.scripted_agent import hello_message

GOOD: dict[str, Any] = {"ok": True, "method": "scripted", "stopped_ns": 250_000, "latency_ns": 3_000_000}
REFUSED: dict[str, Any] = {
    "ok": False,
    "code": "ATTACH_TRACED",
    "reason": "process 1 is traced by process 2 (gdb); end that one",
}


def command(script: str) -> list[str]:
    """The command line of such a helper."""
    return [sys.executable, __file__, script]


def be_agent(channel: socket.socket, script: str) -> None:
    """Plays the agent at the other end of the channel, until the daemon closes it."""
    with channel:
        if script == "agent":
            channel.send(wire.encode(hello_message(argv=["attached"])))
        while channel.recv(wire.MAX_FRAME_BYTES):
            pass


def answer(sock: socket.socket, request: dict[str, Any], script: str) -> None:
    """Carries one request out."""
    if script == "crash":
        os._exit(7)
    question = request.get("do")
    if script in ("hang", {"device_graphs": "look-hangs", None: "attach-hangs"}.get(question)):
        signal.pause()
    if script == "killed-always" or (script == "killed" and request["id"] <= 3):
        os.kill(os.getpid(), signal.SIGKILL)
    if script in ("babble", "refuse", "channel-missing", "killed", "attach-hangs"):
        said = {"babble": {"id": -1}, "channel-missing": GOOD}.get(script, REFUSED)
        sock.send(json.dumps({"id": request["id"], **said}).encode())
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    threading.Thread(target=be_agent, args=(ours, script), daemon=True).start()
    with theirs:
        socket.send_fds(sock, [json.dumps({"id": request["id"], **GOOD}).encode()], [theirs.fileno()])


def main() -> None:
    """Serves on standard input."""
    with socket.socket(fileno=0) as sock:
        while data := sock.recv(4096):
            answer(sock, json.loads(data), sys.argv[1])


if __name__ == "__main__":
    main()
