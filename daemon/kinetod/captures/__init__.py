"""Captures: the request, the work in each target, and the whole."""
