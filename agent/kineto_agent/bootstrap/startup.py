"""Imported by the .pth hook when KINETO_AGENT is set: starts the agent with the interpreter.

Whatever goes wrong stays in here: an exception in a .pth line would be printed by every interpreter start.
"""

try:
    import kineto_agent

    kineto_agent.start()
except Exception:  # noqa: BLE001, S110 - see above; start() has logged what it could
    pass
