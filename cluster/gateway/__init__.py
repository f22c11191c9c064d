"""Requests at a gateway: manager, state machine, task, migration and connections. No Ray, no torch."""
