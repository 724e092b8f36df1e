"""Packets of helper services: a head and one JSON object."""

import pytest
from kinetod.counters import messages


def test_what_cannot_be_decoded_is_quoted_in_part_and_printable() -> None:
    packet = messages.encode(messages.ListGpus())[:6] + b'{"type":"' + b"\\u0007A" * 2000 + b'"}'
    with pytest.raises(messages.BadCounterMessage, match="a message that cannot be decoded: ") as told:
        messages.request(packet)
    assert len(str(told.value)) < 600 and str(told.value).isprintable()
