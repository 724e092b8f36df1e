"""The fake ROCm: its libraries, a program that uses them, recordings in child processes, and records as bytes."""
