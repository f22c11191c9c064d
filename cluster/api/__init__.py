"""The gRPC API: servicer, replies, the listening port, and the client library."""
