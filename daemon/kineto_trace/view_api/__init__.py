"""Defines how a view is declared, and the result table that it returns."""
