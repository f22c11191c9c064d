"""Disaggregated serving between replicas: peer links, KV sender and receiver, migration."""
