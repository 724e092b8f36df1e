"""What Pyroscope is sent."""
