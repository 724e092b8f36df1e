"""Real training programs with one planted cause of lost time each, and how well findings name it."""
