"""Views are tested with the variants that kineto_trace.compat registers."""

import kineto_trace.catalog.view_catalog  # noqa: F401
