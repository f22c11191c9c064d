"""The cluster-wide index in Redis, and the server that we bring for it."""
