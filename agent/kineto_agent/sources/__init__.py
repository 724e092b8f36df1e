"""Activity sources: their common interface, the registry that chooses among them, and shared parts."""
