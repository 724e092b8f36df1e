"""Views are tested with the variants that compat/views registers."""

import kineto_trace.catalog.view_catalog  # noqa: F401
