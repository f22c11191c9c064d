"""Admission to NVMe, and the simulation of a trace with the same classes."""
