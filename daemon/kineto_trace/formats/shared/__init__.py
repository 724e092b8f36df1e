"""Holds what the writers of several formats share: text sinks, viewer rows and native packets."""
