"""Framed and authenticated connections: codec, framing, handshake, listener, stream."""
