"""Events of a Chrome trace that Perfetto's format has no form for, kept in the file so that reading it loses none.

Theory of operation
    These are metadata rows, flows (an arrow of Perfetto has neither the name, category and time of a flow nor ends
    without a slice) and events of other phases. They are the JSON of a Chrome trace, compressed, in blocks that each
    have a packet of their own, in a field that other programs skip. Arrows and names of tracks are in the file as well:
    they are for viewers, and the reader takes these rows instead of them.
"""

import io
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from kineto_trace.formats.chrome.verbatim_writer import write_rows
from kineto_trace.formats.shared.text_sinks import TextSink
from kineto_trace.model.trace import Table, Trace

BLOCK_ROWS = 1 << 16
PIECE_BYTES = 1 << 20
_LEVEL = 1
_SEPARATOR = b",\n"


def packed(trace: Trace, tables: Sequence[Table], base_ns: int) -> Iterator[bytes]:
    """Yields the rows of tables that have origin columns, in compressed blocks. base_ns: what their times refer to."""
    for table in tables:
        for first in range(0, len(table), BLOCK_ROWS):
            block = table.take(np.arange(first, min(first + BLOCK_ROWS, len(table))))
            file = io.BytesIO()
            with TextSink(file) as sink:
                write_rows(trace, [block], base_ns, sink)
            yield zlib.compress(file.getvalue().removesuffix(_SEPARATOR), _LEVEL)


def unpacked(block: bytes) -> Iterator[bytes]:
    """Yields the JSON of a block, piece by piece. Raises ValueError if the block is damaged."""
    decompressor = zlib.decompressobj()
    while block and not decompressor.eof:
        try:
            yield decompressor.decompress(block, PIECE_BYTES)
        except zlib.error as exc:
            raise ValueError(str(exc)) from exc
        block = decompressor.unconsumed_tail
