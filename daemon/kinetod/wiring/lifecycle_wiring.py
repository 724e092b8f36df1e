"""Builds what keeps ended captures, and runs it in the background."""

import asyncio
import contextlib
from pathlib import Path

from kinetod.captures.result.lifecycle import Keeping
from kinetod.config.settings import Settings
from kinetod.store.capture_store import Store
from kinetod.store.retention import Retention
from kinetod.uploads.remote_reader import RemoteReader
from kinetod.uploads.upload_queue import Uploader
from kinetod.uploads.worker_client import UploadWorker
from kinetod.uploads.worker_settings import worker_environ, worker_options

WORKER_LOCK = "upload.lock"  # in the state folder


async def start_keeping(settings: Settings, store: Store, stack: contextlib.AsyncExitStack) -> Keeping:
    """Starts retention and uploads, which run until the stack is closed."""
    worker = UploadWorker(
        Path(store.state_dir, WORKER_LOCK),
        lambda: worker_options(settings.current),
        lambda: worker_environ(settings.current),
    )
    stack.push_async_callback(worker.stop)
    uploader = Uploader(settings, store, worker)
    retention = Retention(settings, store, is_pending_upload=uploader.is_pending)
    uploader.on_uploaded = retention.wake
    tasks = [
        asyncio.create_task(uploader.run(), name="uploads"),
        asyncio.create_task(retention.run(), name="retention"),
    ]

    async def stop() -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    stack.push_async_callback(stop)
    return Keeping(store, retention, uploader, RemoteReader(worker))
