"""Imported by the .pth hook when KINETO_AGENT is set: starts the agent with the interpreter.

Errors must not escape: every start of an interpreter would print an exception from a .pth line.
"""

try:
    import kineto_agent

    kineto_agent.start()
except Exception:  # noqa: BLE001, S110 - see above; start() has logged what it could
    pass
