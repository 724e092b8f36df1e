"""Accepts client connections, identifies the peer and limits the connection before gRPC sees it."""
