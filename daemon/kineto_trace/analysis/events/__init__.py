"""Lists the single events of a trace that fit conditions."""
