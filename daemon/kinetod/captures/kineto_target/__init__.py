"""Captures that a process's own libkineto records on demand: the request's text, the life of one, the file."""
