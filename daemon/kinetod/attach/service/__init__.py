"""The attach helper as a service of its own: the only part of an installation with rights over other processes."""
