"""Decides who may do what and how much of it, as pure rules without I/O."""
