"""The traces that properties of all traces are tested with: our recordings, and other people's where there are any.

KINETO_PUBLIC_TRACES names a folder of traces that are not ours, for example those of the tests of HTA
(facebookresearch/HolisticTraceAnalysis, tests/data) and the samples of the TensorBoard plug-in (pytorch/kineto,
tb_plugin/samples). We do not distribute them.
"""

import lzma
import os
from pathlib import Path

from support.trace_files.h200 import DATA

VARIABLE = "KINETO_PUBLIC_TRACES"
_SUFFIXES = (".json", ".json.gz", ".pftrace")


def trace_paths() -> list[Path]:
    """Returns the paths of all traces; those that end in .xz are packed. Raises ValueError for an empty folder."""
    return [*sorted(DATA.glob("*-kineto.json.xz")), DATA / "ddp4" / "rank0.json.gz", *public_paths()]


def public_paths() -> list[Path]:
    """Returns the paths of traces that are not ours. Raises ValueError for an empty folder."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return []
    public = sorted(path for path in Path(folder).rglob("*") if path.name.endswith(_SUFFIXES) and path.stat().st_size)
    if not public:
        raise ValueError(f"{VARIABLE}={folder} has no traces")
    return public


def unpacked(path: Path, folder: Path) -> Path:
    """Returns the path of the trace, which is written into the folder if it is packed with xz."""
    if path.suffix != ".xz":
        return path
    found = folder / path.stem
    found.write_bytes(lzma.decompress(path.read_bytes()))
    return found
