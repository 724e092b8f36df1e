"""Describes collectives, matches them across ranks, and aligns the clocks of the ranks by them."""
