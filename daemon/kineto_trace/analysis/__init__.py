"""Holds all views by subject, their catalog, and the runner that applies them to one or many traces."""
