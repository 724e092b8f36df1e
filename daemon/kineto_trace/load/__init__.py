"""Traces from where they lie: raw folders of the daemon, its store, and files of others."""
