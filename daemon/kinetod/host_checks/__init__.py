"""Checks what on this host prevents tracing, whatever the process."""
