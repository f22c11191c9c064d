"""The store server, one process on each node: who may connect, what is stored, and where."""
