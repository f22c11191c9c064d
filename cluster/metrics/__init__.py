"""Metrics, logs and traces, and the usage of each tenant."""
