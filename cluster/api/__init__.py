"""The front of a gateway: gRPC methods, what they reply, the listening port, and the client library."""
