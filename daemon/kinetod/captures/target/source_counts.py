"""What the sources of one target have recorded, as clients see it."""

from collections.abc import Mapping
from typing import Any

from kineto_protos.v1 import profiler_pb2 as pb

from kinetod.base.safe_text import clean
from kinetod.captures.target.arena_reader import ArenaCounts

_MAX_WAY_CHARS = 200


def noted_ways(metadata: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """How each source says it records, from its untrusted metadata. Silent sources are left out."""
    ways = {source: part.get("way") for source, part in metadata.items()}
    return {source: clean(way, _MAX_WAY_CHARS) for source, way in ways.items() if isinstance(way, str) and way}


def stored_bytes(target: pb.Target) -> int:
    """Bytes that a target of a running capture takes on disk: its files, or its records before they are decoded."""
    return sum(file.size_bytes for file in target.files) or sum(counts.bytes for counts in target.counts)


def source_counts(counts: Mapping[str, ArenaCounts], ways: Mapping[str, str]) -> list[pb.SourceCounts]:
    """One entry for each source that has an arena."""
    return [
        pb.SourceCounts(
            source=name, records=each.records, bytes=each.bytes, dropped=each.dropped, way=ways.get(name, "")
        )
        for name, each in counts.items()
    ]
