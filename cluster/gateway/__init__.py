"""Requests at a gateway: manager, state machine, task, migration and replica connections. No Ray, no torch."""
