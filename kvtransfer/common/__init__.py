"""Primitives that every package uses: clock, faults, host, tasks, back-off, moving averages."""
