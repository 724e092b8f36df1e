"""The agent's side of the link, its sources and their records, driven by a test."""
