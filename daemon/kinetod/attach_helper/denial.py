"""Why the attach helper does not do what it is asked for."""


class Denial(Exception):
    """A request is refused. The text is the answer to the caller."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
