"""Wraps the operating system and the interpreter so that the agent's threads, descriptors and settings do not disturb
the program.
"""
