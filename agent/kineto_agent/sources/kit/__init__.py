"""The collector kit: the parts shared by sources of all vendors' tracing libraries."""
