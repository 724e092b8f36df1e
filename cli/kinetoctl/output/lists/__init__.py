"""Lists of processes and captures, printed once or kept up to date."""
