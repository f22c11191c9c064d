"""The cluster-wide index in Redis, and the embedded server for it."""
