"""Keeps the link to the agents in target processes and brings agents in and out."""
