"""What kinetoctl prints: results on stdout, progress on stderr."""
