"""kinetoctl: the command line of kinetod."""
