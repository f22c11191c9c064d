"""Metrics, logs and traces, and what each tenant uses."""
