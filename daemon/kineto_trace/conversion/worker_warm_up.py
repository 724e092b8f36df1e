"""What only the first conversion of a process takes, taken before there is a job: late imports, first uses of Arrow.

Each job of a decode worker is the first one of its process. What the warm process has done by then, none of them does
again: about 10 ms, a sixth of the processor time of a small job.
"""

import tempfile
from pathlib import Path

from kineto_trace.conversion.target_conversion import convert_target
from kineto_trace.decode.cupti.cupti_layouts import LAYOUTS
from kineto_trace.decode.cupti.cupti_records import FORMAT, kinds_of
from kineto_trace.model.target_info import TargetInfo
from kineto_trace.spool.raw_records import RawWriter

_BEGIN_NS, _STEP_NS = 1_700_000_000_000_000_000, 1000


def convert_a_sample() -> None:
    """Converts a made-up target with one record of each kind in a temporary folder. Raises OSError, TraceError."""
    with tempfile.TemporaryDirectory(prefix="kineto-warm-") as name:
        folder = Path(name)
        version = max(LAYOUTS)
        with RawWriter(folder / "raw/cupti", source="cupti", format=FORMAT, metadata={"cupti_version": version}) as raw:
            records = _records(version)
            raw.append_buffer(b"".join(records), sequence=0, records=len(records))
            raw.finish(metadata={}, record_bytes={}, records=len(records), dropped=0)
        TargetInfo(capture_id="", host="", pid=1, process_name="").write(folder)
        convert_target(folder, formats=[])


def _records(version: int) -> list[bytes]:
    """One of each kind, one after the other in time."""
    written = []
    for number, known in enumerate(kinds_of(LAYOUTS[version])):
        layout = LAYOUTS[version].records[known.layout]
        record = bytearray(layout.size)
        record[:4] = known.kind.to_bytes(4, "little")
        for field, time_ns in (("start", _BEGIN_NS), ("end", _BEGIN_NS + _STEP_NS // 2)):
            if field in layout.offsets:
                at = layout.offsets[field]
                record[at : at + 8] = (time_ns + number * _STEP_NS).to_bytes(8, "little")
        written.append(bytes(record))
    return written
