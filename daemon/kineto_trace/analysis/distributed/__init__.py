"""Compares the ranks of a job: collectives, overlap, waiting and stragglers."""
