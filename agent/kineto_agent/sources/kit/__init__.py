"""Records through the collector kit: what sources of any vendor's tracing library share."""
