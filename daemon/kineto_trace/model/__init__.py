"""Defines what a trace is in memory: its tables, its target, its kinds of events and the context of its analyses."""
