"""The store server, one process on each node: connections, the records of all tiers, and loading."""
