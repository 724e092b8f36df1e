"""Shows where the host's time goes: operators, modules and Python functions."""
