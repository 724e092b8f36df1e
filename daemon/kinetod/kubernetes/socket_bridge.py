"""Turns a connected socket into an address, because gRPC can connect only to addresses.

Theory of operation
    Only root may connect to the kubelet's socket. The attach helper, which is root, connects and passes the connection
    on; it does not use gRPC, and this side needs no privileges. Here a socket with a random name in the abstract
    namespace accepts one connection from this very process and passes data both ways.
"""

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator

from kineto_protos import unix_peer

_CHUNK_BYTES = 64 << 10


@contextlib.asynccontextmanager
async def passage(sock: socket.socket) -> AsyncIterator[str]:
    """A gRPC address that leads once to the other end of `sock`. Takes ownership of it. Raises OSError."""
    joined: set[asyncio.Task[None]] = set()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if joined or _pid(writer) != os.getpid():
            writer.close()
            return
        joined.add(task)
        await _join(reader, writer, *ends)

    try:
        ends = await asyncio.open_unix_connection(sock=sock)
    except BaseException:
        sock.close()
        raise
    name = f"kinetod-{secrets.token_hex(16)}"
    server = await asyncio.start_unix_server(accepted, path=f"\0{name}", backlog=1)
    try:
        yield f"unix-abstract:{name}"
    finally:
        server.close()
        for task in joined:
            task.cancel()
        await asyncio.gather(*joined, return_exceptions=True)
        ends[1].close()


def _pid(writer: asyncio.StreamWriter) -> int:
    return unix_peer.credentials(writer.get_extra_info("socket"))[0]


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Copies data both ways until both ends are done or one breaks."""
    try:
        await asyncio.gather(_pass_on(reader, far_writer), _pass_on(far_reader, writer))
    except OSError:
        pass
    finally:
        writer.close()
        far_writer.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
