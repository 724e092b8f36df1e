"""Views are tested with what compat/ registers for them."""

import kineto_trace.catalog.view_catalog  # noqa: F401
