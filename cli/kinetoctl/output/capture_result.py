"""Prints the result of a trace or fetch on stdout, in the format of --output."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinetoctl.base.common_options import CommonOptions
from kinetoctl.output.capture_summary import print_capture
from kinetoctl.output.json_yaml import emit, plain

if TYPE_CHECKING:
    from kineto_protos.v1 import profiler_pb2 as pb

Paths = Mapping[tuple[int, int, str], Path]


def capture_document(capture: "pb.Capture", paths: Paths) -> dict[str, Any]:
    """The capture, and for each file its `path` on this machine (null if it was not fetched)."""
    document = plain(capture)
    for target in document["targets"]:
        for file in target["files"]:
            path = paths.get((target["pid"], target["start_time_ns"], file["format"]))
            file["path"] = str(path) if path else None
    return document


def show_capture(capture: "pb.Capture", paths: Paths, settings: CommonOptions) -> None:
    """Print one capture."""
    if settings.output == "table":
        print_capture(capture, paths, color=settings.color)
    else:
        emit(capture_document(capture, paths), settings.output)
