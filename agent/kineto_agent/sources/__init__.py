"""Activity sources: the interface that every source implements, the registry that chooses among them, and what several
of them share.
"""
