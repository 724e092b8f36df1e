"""The activity sources: one module per vendor or language, what they share in `interface`."""
