"""Derives the upload worker's options from the configuration."""

from kineto_trace.store.object_stores import scheme_of

from kinetod.config.settings import Config
from kinetod.uploads.store_credentials import credential_variables
from kinetod.uploads.worker_protocol import WorkerOptions


def worker_options(config: Config) -> WorkerOptions:
    """The options of the next worker."""
    return WorkerOptions(
        bytes_per_second=config.upload_bytes_per_second,
        endpoint=config.upload_endpoint,
        timeout_s=config.upload_timeout_ns / 1e9,
    )


def worker_environ(config: Config) -> dict[str, str]:
    """The variables by which the store's library finds `upload.credentials`. Blocking. Raises OSError."""
    if config.upload_credentials is None or not config.upload_url:
        return {}
    return credential_variables(scheme_of(config.upload_url), config.upload_credentials)
