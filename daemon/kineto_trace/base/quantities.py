"""Times, shares and numbers in sentences."""


def ms(ns: float) -> str:
    """Returns a time in ms with three digits."""
    return f"{ns / 1e6:.3g} ms"


def share(part: float, whole: float) -> str:
    """Returns a part of a whole in per cent with three digits."""
    return f"{100 * part / whole:.3g} %" if whole else "0 %"


def times(count: int, one: str, several: str = "") -> str:
    """Returns a number with its noun."""
    return f"{count} {one if count == 1 else several or one + 's'}"
