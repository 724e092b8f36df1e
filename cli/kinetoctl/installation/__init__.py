"""Installs kinetod on a host (users, units, configuration, folders) and removes it again."""
