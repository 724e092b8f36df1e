"""The commands of `kinetoctl migrate`, for those who come from another profiler's daemon."""
