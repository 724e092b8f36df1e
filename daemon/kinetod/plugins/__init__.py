"""Accelerators that come as plug-ins: what one declares, who may install one, loading it, sending it to agents."""
