"""Admission: which requests are taken, and in which order they go to the replicas."""
