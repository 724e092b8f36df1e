"""Reads and writes the raw records and attachments that the daemon copies out of a target."""
