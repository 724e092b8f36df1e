"""pprof's profile format."""
