"""Captures recorded on demand by a process's own libkineto: the request's text, the run, the file."""
