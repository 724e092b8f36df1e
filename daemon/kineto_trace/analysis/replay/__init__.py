"""Runs the steps of a process again without a part of their work, and without what recording them cost."""
