"""Counts the calls that a client starts by the HEADERS frames of HTTP/2 that it sends (RFC 9113, 4.1 and 6.2).

Nothing else of HTTP/2 is examined. Anything that is not HTTP/2 passes: gRPC closes such a connection.
"""

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADER_BYTES = 9  # of a frame: 3 of length, 1 of type, 1 of flags, 4 of the stream
HEADERS = 1  # the frame type


class Streams:
    """Counts the streams of one connection, from its first byte on."""

    def __init__(self) -> None:
        self._preface = PREFACE  # what is left of it
        self._foreign = False
        self._begun = b""  # of a frame's header, whose rest has not come
        self._payload = 0  # bytes of the frame's payload that have not come

    def cut(self, data: bytes, most: int) -> tuple[int, int]:
        """How many bytes may pass so that at most `most` calls begin, and how many begin in them.

        These bytes count as passed: the next call takes what follows.
        """
        if self._foreign:
            return len(data), 0
        at = self._past_preface(data)
        calls, size = 0, len(data)
        while at < size and not self._foreign:
            if self._payload:
                skipped = min(self._payload, size - at)
                self._payload -= skipped
                at += skipped
                continue
            part = data[at : at + HEADER_BYTES - len(self._begun)]
            if len(self._begun) <= 3 < len(self._begun) + len(part) and part[3 - len(self._begun)] == HEADERS:
                if calls == most:
                    return at, calls
                calls += 1
            at += len(part)
            self._begun += part
            if len(self._begun) == HEADER_BYTES:
                self._payload = int.from_bytes(self._begun[:3], "big")
                self._begun = b""
        return size, calls

    def _past_preface(self, data: bytes) -> int:
        """Where the frames begin."""
        part = data[: len(self._preface)]
        self._foreign = not self._preface.startswith(part)
        self._preface = self._preface[len(part) :]
        return len(part)
