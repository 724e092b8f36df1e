"""What the daemon runs or calls when a capture has ended."""
