"""Where a process's own libkineto writes its traces, and how its file is fetched from there and removed."""
