"""Captures as the daemon uploads them, with real traces of several ranks, without a daemon."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
from kinetod.uploads.upload_job import RemoteCapture, Throttle, UploadJob, sink_for, upload_capture

from support.service.stored import store


def upload(
    url: str,
    folder: Path,
    ranks: Mapping[int, int],
    *,
    fleet: str = "",
    lost: Sequence[int] = (),
    damaged: Sequence[int] = (),
    fs: Any = None,
) -> str:
    """One capture into URL/HOST/CAPTURE. ranks: to the microseconds of their kernels; lost: without a trace.

    damaged: ranks whose kernels were damaged before. Returns its folder's URL.
    """
    own = folder / url.replace("/", "_")
    targets, spoiled = [], {}
    for rank in (*ranks, *lost):
        key = f"{100 + rank}-{7_000_000_000 + rank}"
        about = {"pid": 100 + rank, "start_time_ns": str(7_000_000_000 + rank), "process": {"rank": rank}}
        if rank in lost:
            targets.append({**about, "verdict": "VERDICT_FAILED", "reason": "the process ended"})
            continue
        store(own / "targets" / key / "columns", rank=rank, kernel_us=ranks[rank])
        targets.append({**about, "verdict": "VERDICT_DONE"})
        if rank in damaged:
            spoiled[f"{key}/columns/kernel.parquet"] = "has another SHA-256"
    (own / "targets").mkdir(parents=True, exist_ok=True)
    return upload_folder(url, own, targets, fleet=fleet, damaged=spoiled, fs=fs)


def upload_folder(
    url: str,
    folder: Path,
    targets: Sequence[Mapping[str, Any]],
    *,
    fleet: str = "",
    damaged: Mapping[str, str] | None = None,
    fs: Any = None,
) -> str:
    """A capture's folder with these targets, as manifests describe them. fs: of the URL; None: by its scheme."""
    labels = {"kineto.fleet": fleet} if fleet else {}
    capture = {"id": url.rpartition("/")[2], "spec": {"labels": labels}, "targets": list(targets)}
    scheme, _, place = url.partition("://")
    found, root = (fs, place) if fs is not None else fsspec.core.url_to_fs(url)
    task = UploadJob(folder=folder, url=url, capture=capture, known={}, damaged=damaged or {})
    upload_capture(task, sink_for(scheme, found, Throttle(0).share("")), RemoteCapture(found, root), lambda _: None)
    return url
