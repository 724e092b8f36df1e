"""What an operator's inputs look like, from the agent's binary form to Kineto's JSON arguments."""


class UnreadableInputs(ValueError):
    """The entry is not in the form that the agent writes."""


def inputs_text(entry: bytes) -> str:
    """The arguments "Input Dims", "Input Strides", "Input type" and "Concrete Inputs". Raises UnreadableInputs."""
    raise UnreadableInputs(f"{len(entry)} bytes")
