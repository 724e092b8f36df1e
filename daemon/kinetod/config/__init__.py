"""Declares every setting and reads the configuration from options, environment and file."""
