"""Provides what every layer may use: files that are written atomically, and text that is safe to show."""
