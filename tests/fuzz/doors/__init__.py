"""Damaged input for every door of the service: mutators, one module per door, and the loop that drives them."""
