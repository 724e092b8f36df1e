"""Finds where a process's own libkineto writes its traces, fetches the files and removes them."""
