"""Profiles for tests: a small trace, what receives pushes, and pprof itself."""
