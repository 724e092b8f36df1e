"""Holds the views by subject, each beside what it computes."""
