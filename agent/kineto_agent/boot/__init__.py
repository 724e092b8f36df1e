"""How the agent starts: by the .pth hook, by `kinetoctl run`, by `python -m kineto_agent`."""
