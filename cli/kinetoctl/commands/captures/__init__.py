"""The commands of `kinetoctl captures`, which work on stored and running captures."""
