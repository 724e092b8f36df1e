"""The commands of `kinetoctl plugin`, for those who write and install plug-ins for accelerators."""
