"""Checks this host for things that prevent tracing of any process."""
