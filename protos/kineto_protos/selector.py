"""Values of `Selector` that both sides know."""

ANY_RANK = -1  # in `ranks`: every process that has one
