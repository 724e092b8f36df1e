"""What a confined worker does, with all that it imports: imported once, by the process that workers are forked from."""

import kineto_trace.sql.arrow_tables  # noqa: F401 - which a query imports, and a worker would have to each time

from kinetoctl.web.analyses import worker_main
from kinetoctl.web.analyses.trace_jobs import TraceJobs
from kinetoctl.web.analyses.worker_main import serve


def serve_confined(descriptor: int) -> None:
    """Serves one user of kinetod-web, in a sandbox. Whoever asks ends it when it takes too long."""
    serve(worker_main.DescriptorSocket(descriptor), TraceJobs(), limit_s=None)
