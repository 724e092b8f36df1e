"""Builds the daemon's subsystems from the configuration and connects them."""
