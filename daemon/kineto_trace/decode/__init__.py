"""Raw records of the activity sources to columns."""
