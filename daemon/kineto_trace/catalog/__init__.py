"""Registers all views, and runs them over one or many traces."""
