"""Maintains the links to the agents in target processes, and brings agents in and out."""
