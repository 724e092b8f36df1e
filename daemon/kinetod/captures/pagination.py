"""Pages of captures: how many fit into a message, and where the next page begins."""

import base64
import binascii

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.base.errors import invalid

MAX_PAGE_BYTES = 3 << 20  # gRPC clients accept 4 MiB by default


def fitting(captures: list[pb.Capture]) -> list[pb.Capture]:
    """The leading captures that fit into one message; at least one."""
    total = 0
    for number, capture in enumerate(captures):
        total += capture.ByteSize()
        if total > MAX_PAGE_BYTES and number:
            return captures[:number]
    return captures


def to_token(capture: pb.Capture) -> str:
    """The token of the page after this capture."""
    return base64.urlsafe_b64encode(f"{capture.created_ns}:{capture.id}".encode()).decode()


def from_token(token: str) -> tuple[int, str]:
    """created_ns and id of the last capture on the previous page. Raises InvalidRequest."""
    try:
        created_ns, _, capture_id = base64.urlsafe_b64decode(token.encode()).decode().partition(":")
        return int(created_ns), capture_id
    except (ValueError, binascii.Error) as exc:
        raise invalid(
            "page_token", "is not a page token of this daemon; use next_page_token of the previous page"
        ) from exc
