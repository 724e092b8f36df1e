"""Messages sent to Pyroscope."""
