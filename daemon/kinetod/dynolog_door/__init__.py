"""Serves `dyno` and other clients of Dynolog: translates their requests into kinetod's own."""
