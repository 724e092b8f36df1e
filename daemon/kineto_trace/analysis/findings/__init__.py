"""Suggests what to change first, with the time that each change would save."""
