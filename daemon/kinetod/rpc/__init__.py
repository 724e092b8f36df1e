"""The daemon's gRPC face. Nothing below this folder knows gRPC."""
